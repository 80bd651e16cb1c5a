"""``Patch.at_size``: the size of the next image, for models that read their grid from values."""

from __future__ import annotations

import pytest
import torch
from tests.models.test_every_family import call, model_of
from tests.models.tiny import FAMILIES
from tests.vits import vit

from tokenmerge import ConfigError, ToMeConfig, UnsupportedModelError, ViTConfig, apply_token_merging

HALF = ToMeConfig(ratio=0.5)


def test_positions_take_precedence_over_the_given_size():
    family = FAMILIES["FluxTransformer2DModel"]
    model, arguments = model_of(family), family.inputs(2, 4, 8)
    handle = apply_token_merging(model, HALF)
    expected = call(model, arguments)
    for wrong in ((16, 8), (8, 8)):  # as many tokens in another order, and fewer
        handle.at_size(*wrong)
        assert torch.equal(call(model, arguments), expected)


def test_the_given_size_counts_if_positions_are_not_those_of_a_picture():
    family = FAMILIES["FluxTransformer2DModel"]
    model, arguments = model_of(family), family.inputs(2, 4, 8)
    arguments["img_ids"] = torch.randn(arguments["img_ids"].shape)
    dense = call(model, arguments)
    handle = apply_token_merging(model, HALF)
    with pytest.raises(UnsupportedModelError, match="img_ids: expected one image"):
        call(model, arguments)
    handle.at_size(8, 16)
    with handle.record() as recorded:
        assert not torch.equal(call(model, arguments), dense)
    assert {plan.grid for plan in recorded.values()} == {(1, 4, 8)}
    handle.at_size(8, 8)
    with pytest.raises(UnsupportedModelError, match="img_ids: expected one image"):
        call(model, arguments)


def test_any_positions_are_accepted_if_nothing_merges():
    family = FAMILIES["FluxTransformer2DModel"]
    model, arguments = model_of(family), family.inputs(2, 4, 8)
    arguments["img_ids"] = torch.randn(arguments["img_ids"].shape)
    dense = call(model, arguments)
    apply_token_merging(model, ToMeConfig(ratio=0))
    assert torch.equal(call(model, arguments), dense)


@pytest.mark.parametrize("size", [(0, 8), (8, -2), (8, 7), (8.0, 8), (True, 8), ("8", 8), (None, 8)])
def test_an_invalid_size_is_refused(size):
    handle = apply_token_merging(model_of(FAMILIES["FluxTransformer2DModel"]), HALF)
    with pytest.raises(ConfigError, match=r"(height|width): expected .* multiples of 2, got"):
        handle.at_size(*size)


def test_vision_transformers_need_no_size():
    handle = apply_token_merging(vit(), ViTConfig(r=2))
    with pytest.raises(ConfigError, match="at_size: a vision transformer"):
        handle.at_size(8, 8)
