"""What must hold for every family, with proportional attention by a kernel that takes no mask, as on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.kernels import backend
from tests.models import test_every_family as laws
from tests.models.test_every_family import call, model_of
from tests.models.tiny import FAMILIES, Family
from tokenmerge import ToMeConfig, apply_token_merging

# Their attention is linear, and has no weights that a size could multiply.
LINEAR = ("SanaTransformer2DModel", "SanaControlNetModel")
EVERY = pytest.mark.parametrize("family", [own for name, own in FAMILIES.items() if name not in LINEAR],
                                ids=[name for name in FAMILIES if name not in LINEAR])  # fmt: skip


def same_with(family: Family, name: str) -> bool:
    """Whether the dense model computes the same with this back-end as by PyTorch's attention.

    Models that give a mask run with few other back-ends, and with some of these they take it for padding.
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


@pytest.fixture
def kernel(family: Family) -> Iterator[str]:
    """The strictest back-end that the dense model runs with."""
    name = next((name for name in ("flash", "flash_varlen") if same_with(family, name)), None)
    if name is None:
        pytest.skip("the model itself gives a mask that no such kernel takes")
    with backend(name):
        yield name


@pytest.fixture
def proportional(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the laws of families have proportional attention."""
    settings = laws.settings

    def with_sizes(family: Family, **changes: Any) -> ToMeConfig:
        return settings(family, **{"proportional": True, **changes})

    monkeypatch.setattr(laws, "settings", with_sizes)


LAWS = [
    laws.test_ratio_0_is_bit_equal,
    laws.test_half_of_the_tokens_never_reach_the_attention,
    laws.test_removal_leaves_no_trace,
    laws.test_an_image_does_not_depend_on_its_batch,
]


@EVERY
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_laws_of_every_family(law, family, proportional):
    law(family)


@EVERY
def test_reordered_tokens(family, proportional, monkeypatch):
    laws.test_reordering_tokens_changes_nothing(family, (7, 5), monkeypatch)


@EVERY
def test_sizes_act_as_by_a_mask(family, kernel, monkeypatch):
    """The same model by PyTorch's attention with a mask is what it is compared with, up to rounding.

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
