"""Models whose positions have no batch axis: guidance shares them, and images have their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models.test_every_family import call, model_of
from tests.models.tiny import FAMILIES
from torch import Tensor, nn
from torch.testing import assert_close

from tokenmerge import MergeSharing, ToMeConfig, apply_token_merging
from tokenmerge.models.find import find_hosts

SHARED = [
    name
    for name in FAMILIES
    if not all(block.batched for block in find_hosts(model_of(FAMILIES[name]))[0].blocks)
]
EVERY = pytest.mark.parametrize("name", SHARED)


class Guided:
    """A pipeline that calls its model with both prompts of guidance in one batch."""

    do_classifier_free_guidance = True

    def __init__(self, model: nn.Module) -> None:
        self.transformer = model


def guided(name: str, pictures: int) -> dict[str, Any]:
    """Arguments of a call with each image twice: with its text, and with another one."""
    family = FAMILIES[name]
    once, twice = family.inputs(pictures, 8, 8), family.inputs(2 * pictures, 8, 8)
    arguments = {key: repeated(value, twice[key]) for key, value in once.items()}
    text = once["encoder_hidden_states"]
    return {**arguments, "encoder_hidden_states": torch.cat([text, -text])}


def repeated(once: Any, twice: Any) -> Any:
    """An argument for a batch that holds each image twice; ``twice`` is that of as many other images."""
    if isinstance(once, dict):
        return {key: repeated(value, twice[key]) for key, value in once.items()}
    if isinstance(once, list) and isinstance(once[0], Tensor):
        return [repeated(one, two) for one, two in zip(once, twice, strict=True)]
    return torch.cat([once, once]) if isinstance(once, Tensor) and once.shape != twice.shape else twice


def calls_of_attention(model: nn.Module, arguments: dict[str, Any]) -> tuple[Tensor, int]:
    """The result of a call, and how often an attention layer that merges was called in it."""
    host, count = find_hosts(model)[0], 0
    block = host.blocks[0]
    layer = next(layer for layer in block.layers if layer.kind == "attn1")
    attention: Any = getattr(block.module, layer.name)
    projections = ("to_q", "to_qkv_mlp_proj", "img_attn_qkv", "img_qkv_proj")
    first = next(getattr(attention, name) for name in projections if hasattr(attention, name))

    def note(*_: Any) -> None:
        nonlocal count
        count += 1

    handle = first.register_forward_hook(note)
    result = call(model, arguments)
    handle.remove()
    return result, count


@EVERY
def test_copies_of_one_picture_take_one_call_of_attention(name):
    model = model_of(FAMILIES[name])
    dense, once = calls_of_attention(model, guided(name, 1))
    pipe = Guided(model)
    apply_token_merging(pipe, ToMeConfig(ratio=0.5))
    merged, calls = calls_of_attention(model, guided(name, 1))
    assert calls == once
    assert not torch.equal(merged, dense)


@EVERY
@pytest.mark.parametrize("shares", [True, False])
def test_a_guided_picture_does_not_depend_on_its_batch(name, shares):
    model = model_of(FAMILIES[name])
    pipe = Guided(model)
    apply_token_merging(pipe, ToMeConfig(ratio=0.5, merge_sharing=MergeSharing(guidance=shares)))
    alone, together = call(model, guided(name, 1)), call(model, guided(name, 2))
    own = together.unflatten(0, (2, -1))[:, : len(alone) // 2].flatten(0, 1)
    assert_close(own, alone, rtol=1e-5, atol=1e-5 * alone.abs().max().item())
