"""In a sequence of text, image and padding, only tokens of the image merge.

Tokens that merge get the same result from a layer, and no other two tokens do. A test that reorders tokens
would show nothing for models without position tables: attention takes text and image in any order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models.family import TEXT, WORDS, noise
from tests.models.test_every_family import call, model_of
from tests.models.tiny import FAMILIES
from torch import Tensor

from tokenmerge import ToMeConfig, apply_token_merging

ROWS, COLUMNS = 7, 9


def between(first: int, n: int = ROWS * COLUMNS) -> slice:
    return slice(first, first + n)


def equal_tokens(y: Tensor) -> Tensor:
    """``[b, n, n]``: which pairs of tokens are equal. Tokens of padding are equal without merging."""
    return (y.unsqueeze(1) == y.unsqueeze(2)).all(dim=-1)


@pytest.mark.parametrize(
    ("name", "layer", "image"),
    [
        ("AuraFlowTransformer2DModel", "single_transformer_blocks.1.attn", [between(WORDS + 8)] * 2),
        ("AuraFlowTransformer2DModel", "single_transformer_blocks.1.ff", [between(WORDS + 8)] * 2),
        # Texts of 7 and of 5 words, each followed by its image and then by padding.
        ("Lumina2Transformer2DModel", "layers.1.attn", [between(WORDS), between(WORDS - 2)]),
        ("Lumina2Transformer2DModel", "layers.1.feed_forward", [between(WORDS), between(WORDS - 2)]),
        ("ZImageTransformer2DModel", "noise_refiner.0.attention", [between(0)] * 2),
        ("ZImageTransformer2DModel", "layers.1.attention", [between(0)] * 2),
        ("ZImageTransformer2DModel", "layers.1.feed_forward", [between(0)] * 2),
        ("CogView3PlusTransformer2DModel", "transformer_blocks.1.ff", [between(WORDS)] * 2),
        ("FluxTransformer2DModel", "single_transformer_blocks.1.attn", [between(WORDS)] * 2),
        ("Flux2Transformer2DModel", "single_transformer_blocks.1.attn", [between(WORDS)] * 2),
        (
            "LTXVideoTransformer3DModel from an image",
            "transformer_blocks.1.attn1",
            [between(ROWS * COLUMNS, 3 * ROWS * COLUMNS)] * 2,
        ),
        (
            "CogVideoXTransformer3DModel",
            "transformer_blocks.1.ff",
            [between(WORDS, 3 * ROWS * COLUMNS)] * 2,
        ),
    ],
)
def test_only_tokens_of_the_image_merge(name, layer, image):
    model = model_of(FAMILIES[name])
    results: list[Tensor] = []

    def keep(module: Any, args: Any, result: Tensor) -> None:
        results.append(result)

    model.get_submodule(layer).register_forward_hook(keep)
    call(model, FAMILIES[name].inputs(2, ROWS, COLUMNS))
    patch = apply_token_merging(model, ToMeConfig(ratio=0.5, merge_mlp=True))
    with patch.record() as recorded:
        call(model, FAMILIES[name].inputs(2, ROWS, COLUMNS))
    planned = recorded[layer.rpartition(".")[0]].plan.labels().unsqueeze(-1)
    dense, merged = (equal_tokens(result) for result in results)
    for pairs, places, labels in zip(merged & ~dense, image, planned, strict=True):
        together = (labels == labels.T).fill_diagonal_(False)
        assert torch.equal(pairs[places, places], together)
        pairs[places, places] = False
        assert not pairs.any()


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("CogView4Transformer2DModel", "transformer_blocks.1.ff"),
        ("EasyAnimateTransformer3DModel", "transformer_blocks.1.ff"),  # the first has two MLPs
    ],
)
def test_an_mlp_that_runs_on_the_text_too_stays_dense(name, layer):
    model, inputs = model_of(FAMILIES[name]), FAMILIES[name].inputs(2, 8, 8)
    long = {"encoder_hidden_states": noise(2, 300, TEXT), "attention_mask": None}  # longer than the image
    results: list[Tensor] = []

    def keep(module: Any, args: Any, result: Tensor) -> None:
        results.append(result)

    model.get_submodule(layer).register_forward_hook(keep)
    apply_token_merging(model, ToMeConfig(ratio=0.5, merge_mlp=True))
    call(model, {**inputs, **{key: value for key, value in long.items() if key in inputs}})
    assert len(results) == 2
    for result in results:
        assert equal_tokens(result).sum() == result.shape[0] * result.shape[1]
