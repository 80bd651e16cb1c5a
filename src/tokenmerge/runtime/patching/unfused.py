"""Attention in which merged tokens count once, and not as often as the tokens that they stand for."""

from __future__ import annotations

from typing import Any

from torch import nn

from tokenmerge.config import ToMeConfig
from tokenmerge.config.origin import is_default
from tokenmerge.models.base import Grids
from tokenmerge.models.fused import is_fused, splits_attention
from tokenmerge.runtime.blocks.forward import takes_part
from tokenmerge.runtime.memory.state import LayerState, ModelState
from tokenmerge.runtime.patching.call_checks import merges_tokens, phases_at
from tokenmerge.runtime.patching.watched import meets, watchers_in


def why_tokens_count_once(
    state: ModelState, root: nn.Module, pipe: object, config: ToMeConfig, grids: Grids | None = None
) -> str:
    """Return why merged tokens count once with settings that leave it open, or an empty string.

    Attention processors may have been set since the model was patched. Only layers matter in which tokens
    merge, and count as often as the tokens that they stand for. ``grids`` are the finest token grids of the
    next call, or None if they are unknown.
    """
    if not state.may_count_once:
        return ""
    splits = splits_attention(pipe)
    layers = [layer for layer in _own_attention(state) if splits or not is_fused(_module(root, layer))]
    layers = [layer for layer in layers if _weighs(layer, config, grids)]
    name = type(root).__name__
    therefore = "so merged tokens count once in attention, and not as often as the tokens they stand for"
    if splits and layers:
        return f"{name}: {type(pipe).__name__} attends to the parts of a batch apart, {therefore}"
    if layers and is_default(state.method):  # it leaves alone what others look at
        watched = watchers_in(root)
        layers = [layer for layer in layers if not meets(layer.path, watched)]
    if not layers:
        return ""
    attention: Any = _module(root, layers[0])
    code = type(getattr(attention, "processor", attention)).__name__
    return f"{name}: {code} at {layers[0].path} runs no fused attention, {therefore}"


def _own_attention(state: ModelState) -> list[LayerState]:
    """Return the self-attention among the parts of a model, as far as its keys are its own."""
    layers = [part for part in state.parts if isinstance(part, LayerState)]
    return [part for part in layers if part.layer.kind == "attn1" and part.layer.own_keys]


def _module(root: nn.Module, layer: LayerState) -> nn.Module:
    return root.get_submodule(layer.path)


def _weighs(layer: LayerState, config: ToMeConfig, grids: Grids | None) -> bool:
    """Return whether merged tokens should count as often as they stand for in a layer, in some step."""
    merging = [
        (level, phase)
        for level, phase in phases_at(config, layer.block.level)
        if phase.merges
        and phase.proportional
        and takes_part(layer.layer, phase)
        and (phase.scope != "block" or layer.block.block_layout is not None)
    ]
    return bool(merging) and (grids is None or merges_tokens(merging, *grids))
