"""Masks that users give to all attention, such as those of regional prompts, follow the tokens that merge."""

from __future__ import annotations

import pytest
import torch
from tests.models.family import WORDS
from tests.models.test_every_family import call, model_of, reordering
from tests.models.tiny import FAMILIES
from torch import Tensor
from torch.testing import assert_close

from tokenmerge import ToMeConfig, UnsupportedModelError, apply_token_merging
from tokenmerge.planners import PLANNERS

ROWS, COLUMNS = 6, 8
EVERY = WORDS + ROWS * COLUMNS  # tokens of text and image
# By the axes of queries: a mask for each of two images, one for all, and shorter forms that broadcast.
SHAPES = ((2, 1, EVERY), (1, 1, EVERY), (4, EVERY), (EVERY,), (2, 1, 1))


def random_mask(*shape: int) -> Tensor:
    """A mask ``[*shape, tokens]`` in which every query sees half of the keys, and the first key always."""
    seen = torch.rand(*shape, EVERY, generator=torch.Generator().manual_seed(0)) < 0.5
    seen[..., 0] = True
    return seen


@pytest.mark.parametrize("scope", ["layers", "block"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("added", [False, True])
def test_a_mask_of_any_form_follows_the_tokens_of_flux(scope, shape, added, monkeypatch):
    """Reordered tokens keep their entries, so all that differs is the order of sums."""
    mask = random_mask(*shape)
    _reorders("FluxTransformer2DModel", scope, mask.log() if added else mask, monkeypatch)


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("Flux2Transformer2DModel", "layers"),
        ("Flux2Transformer2DModel", "block"),
        ("BriaFiboTransformer2DModel", "layers"),
        ("BriaFiboTransformer2DModel", "block"),
        ("OvisImageTransformer2DModel", "layers"),
        ("OvisImageTransformer2DModel", "block"),
    ],
)
def test_a_mask_follows_the_tokens_of_other_models(name, scope, monkeypatch):
    _reorders(name, scope, random_mask(2, 1, EVERY), monkeypatch)


def _reorders(name: str, scope: str, mask: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(FAMILIES[name])
    inputs = FAMILIES[name].inputs(2, ROWS, COLUMNS)
    masked = {**inputs, "joint_attention_kwargs": {"attention_mask": mask}}
    dense = call(model, masked)
    assert not torch.equal(dense, call(model, inputs))
    monkeypatch.setitem(PLANNERS, "tome", reordering)
    apply_token_merging(model, ToMeConfig(ratio=0.5, scope=scope, proportional=True, min_tokens=0))
    assert_close(call(model, masked), dense, rtol=1e-5, atol=1e-5 * dense.abs().max().item())


@pytest.mark.parametrize("scope", ["layers", "block"])
def test_a_mask_that_lacks_tokens_of_the_image_is_refused_by_name(scope):
    family = FAMILIES["FluxTransformer2DModel"]
    model, short = model_of(family), torch.ones(1, 1, EVERY, WORDS, dtype=torch.bool)
    apply_token_merging(model, ToMeConfig(ratio=0.5, scope=scope))
    with pytest.raises(
        UnsupportedModelError, match=r"attention_mask: expected .* 48 tokens .* got 7 .*; pass"
    ):
        call(
            model,
            {**family.inputs(1, ROWS, COLUMNS), "joint_attention_kwargs": {"attention_mask": short}},
        )
