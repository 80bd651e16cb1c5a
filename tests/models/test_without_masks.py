"""What must hold for every family, with proportional attention by a kernel that takes no mask, as on GPUs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from tests import kernels
from tests.kernels import backend
from tests.models import test_copies_and_gradients as gradients
from tests.models import test_every_family as laws
from tests.models import test_over_steps as over_steps
from tests.models.test_every_family import call, model_of
from tests.models.tiny import FAMILIES, Family
from torch.testing import assert_close

from tokenmerge import ToMeConfig, apply_token_merging

# Models with linear attention, which has no weights that a size could multiply.
LINEAR = ("SanaTransformer2DModel", "SanaControlNetModel", "SanaVideoTransformer3DModel")
# Models that call PyTorch's attention themselves, whatever back-end is set. It takes a mask.
NEVER_REACHED = {
    "AllegroTransformer3DModel",
    "AudioLDM2UNet2DConditionModel",
    "AuraFlowTransformer2DModel",
    "CogVideoXTransformer3DModel",
    "CogVideoXTransformer3DModel 1.5",
    "CogVideoXTransformer3DModel without rotary positions",
    "CogView3PlusTransformer2DModel",
    "CogView4Transformer2DModel",
    "ConsisIDTransformer3DModel",
    "ControlNetModel",
    "ControlNetUnionModel",
    "DiTTransformer2DModel",
    "EasyAnimateTransformer3DModel",
    "HiDreamImageTransformer2DModel",
    "HiDreamImageTransformer2DModel, padded",
    "HunyuanDiT2DControlNetModel",
    "HunyuanDiT2DModel",
    "I2VGenXLUNet",
    "LatteTransformer3DModel",
    "Lumina2Transformer2DModel",
    "LuminaNextDiT2DModel",
    "MochiTransformer3DModel",
    "PixArtTransformer2DModel",
    "PixArtTransformer2DModel, size conditions",
    "SD3ControlNetModel",
    "SD3ControlNetModel of SD 3.5",
    "SD3Transformer2DModel",
    "SparseControlNetModel",
    "UNet2DConditionModel",
    "UNet2DConditionModel, GLIGEN",
    "UNet2DConditionModel, IP-Adapter",
    "UNet2DConditionModel, SDXL",
    "UNet2DConditionModel, upscaler",
    "UNet3DConditionModel",
    "UNetControlNetXSModel",
    "UNetMotionModel",
    "UNetMotionModel, FreeNoise",
    "UNetSpatioTemporalConditionModel",
    "UniDiffuserModel",
    "UVit2DModel",
    "UVit2DModel, downsampling",
}
# The others would be compared with themselves.
REACHED = [name for name in FAMILIES if name not in LINEAR and name not in NEVER_REACHED]
EVERY = pytest.mark.parametrize("family", [FAMILIES[name] for name in REACHED], ids=REACHED)


def name_of(family: Family) -> str:
    return next(name for name, own in FAMILIES.items() if own is family)


def same_with(family: Family, name: str) -> bool:
    """Whether the dense model computes the same with this back-end as with PyTorch's attention.

    Models that pass a mask run with few other back-ends, and some of these take the mask for padding. Models
    that call PyTorch's attention themselves run with any back-end, because they never call it.
    """
    model, arguments = model_of(family), family.inputs(2, 8, 8)
    expected = call(model, arguments)
    with backend(name):
        try:
            result = call(model, arguments)
        except ValueError as error:
            if "mask" not in str(error):
                raise
            return False
    return torch.allclose(result, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@functools.cache
def calls_kernels(name: str) -> bool:
    """Whether a family leaves the kernel to diffusers."""
    with mock.patch.object(kernels, "attention", wraps=kernels.attention) as attention:
        same_with(FAMILIES[name], "flash")
    return attention.called


@functools.cache
def strictest(name: str) -> str | None:
    """The strictest back-end that the dense model of a family runs with; None: it always passes a mask."""
    family = FAMILIES[name]
    return next((kernel for kernel in ("flash", "flash_varlen") if same_with(family, kernel)), None)


@pytest.fixture
def kernel(family: Family) -> Iterator[str]:
    """The strictest back-end that the dense model runs with."""
    name = strictest(name_of(family))
    if name is None:
        pytest.skip("the model itself gives a mask that no such kernel takes")
    with backend(name):
        yield name


@pytest.mark.slow
def test_the_families_that_no_back_end_reaches_are_these():
    never = {name for name in FAMILIES if strictest(name) == "flash" and not calls_kernels(name)} - {*LINEAR}
    assert never == NEVER_REACHED


@pytest.fixture
def proportional(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the laws of families with proportional attention."""
    settings = laws.settings

    def with_sizes(family: Family, **changes: Any) -> ToMeConfig:
        return settings(family, **{"proportional": True, **changes})

    for module in (laws, over_steps, gradients):
        monkeypatch.setattr(module, "settings", with_sizes)


# Where a mask would be missed: in a call of merged tokens, in a whole block, and in gradients.
LAWS = [
    laws.test_reordering_tokens_changes_nothing,
    over_steps.test_what_merging_a_block_loses_is_given_back,
    gradients.test_gradients_are_those_without_checkpointing,
]


@EVERY
@pytest.mark.filterwarnings("ignore:`Transformer2DModelOutput` is deprecated:FutureWarning")
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_laws_of_every_family(law, family, proportional, monkeypatch):
    given = {"family": family, "monkeypatch": monkeypatch, "grid": (7, 5)}
    law(**{name: given[name] for name in inspect.signature(law).parameters})


@EVERY
def test_sizes_act_as_by_a_mask(family, kernel):
    """The result equals that of PyTorch's attention with a mask, up to rounding.

    As in :func:`tests.models.test_every_family.test_reordering_tokens_changes_nothing`, all that differs is
    the order of sums.
    """
    model, arguments = model_of(family), family.inputs(2, 8, 8)
    apply_token_merging(model, laws.settings(family, proportional=True))
    without_mask = call(model, arguments)
    with backend("native"):
        masked = call(model, arguments)
    assert_close(without_mask, masked, rtol=1e-5, atol=1e-5 * masked.abs().max().item())
    apply_token_merging(model, laws.settings(family))
    assert not torch.allclose(call(model, arguments), masked, rtol=1e-4)
