"""Patches a vision transformer: checks it first, then swaps its methods."""

from __future__ import annotations

from torch import nn

from tokenmerge.errors import NothingToMergeError, UnsupportedModelError
from tokenmerge.models.find import parts
from tokenmerge.runtime.patching.swap import add_hook, check_swappable, swap
from tokenmerge.vit.config import ViTConfig
from tokenmerge.vit.hosts import FAMILIES, Encoder, find_encoders
from tokenmerge.vit.runtime import (
    EncoderLayerState,
    EncoderState,
    begin,
    check_attention,
    collecting_call,
    layer_call,
    swap_parts,
)


def checked_encoders(model: object, config: ViTConfig) -> dict[nn.Module, Encoder]:
    """Find the encoders of a model, and check that they can be patched. Nothing is changed yet.

    Raises:
        UnsupportedModelError: there is no known vision transformer, or its attention back-end cannot do
            proportional attention.
        NothingToMergeError: an encoder has no layers.
    """
    encoders = find_encoders(model)
    if not encoders:
        seen = ", ".join(sorted({type(part).__name__ for part in parts(model)} or {type(model).__name__}))
        names = ", ".join(name for f in FAMILIES for name in (f.model, *f.around, *f.averaging))
        raise UnsupportedModelError(
            f"no vision transformer to merge tokens in: found {seen}; pass a model of one of the classes "
            f"{names} (the last two are timm's), or a ToMeConfig for a diffusion model"
        )
    for root, encoder in encoders.items():
        name = type(root).__name__
        if not encoder.layers:
            raise NothingToMergeError(f"nothing to merge: {name} has no layers; pass a model with layers")
        check_attention(root, config)
        if encoder.family.collector:
            check_swappable(root, name, encoder.family.collector)
        for layer in encoder.layers:
            for path in (layer.path, *(f"{layer.path}.{part}" for part in layer.parts)):
                check_swappable(root.get_submodule(path), path, "forward")
    return encoders


def patch_encoder(root: nn.Module, state: EncoderState) -> None:
    """Patch an encoder from :func:`checked_encoders` that is not patched yet."""
    for index, layer in enumerate(state.facts.layers):
        module, layer_state = root.get_submodule(layer.path), EncoderLayerState(state, index, layer)
        swap(module, "forward", layer_call, layer_state)
        swap_parts(module, layer_state)
    if state.facts.family.collector:
        swap(root, state.facts.family.collector, collecting_call, state)
    add_hook(root, begin, state)
