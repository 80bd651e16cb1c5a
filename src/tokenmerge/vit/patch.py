"""Patches a vision transformer: checks it first, then swaps its methods."""

from __future__ import annotations

from tokenmerge.errors import NothingToMergeError, UnsupportedModelError
from tokenmerge.models.find import parts
from tokenmerge.runtime.swap import add_hook, check_swappable, swap
from tokenmerge.vit.config import ViTConfig
from tokenmerge.vit.hosts import FAMILIES, Encoder, find_encoders
from tokenmerge.vit.runtime import (
    EncoderState,
    LayerState,
    begin,
    check_attention,
    collecting_call,
    layer_call,
    swap_parts,
)


def checked_encoders(model: object, config: ViTConfig) -> tuple[Encoder, ...]:
    """The encoders of a model, after checking that they can be patched. Nothing is changed yet.

    Args:
        model: a model, or an object with models as attributes.
        config: the settings.

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
    for encoder in encoders:
        name = type(encoder.model).__name__
        if not encoder.layers:
            raise NothingToMergeError(f"nothing to merge: {name} has no layers; pass a model with layers")
        check_attention(encoder.model, config)
        if encoder.collector:
            check_swappable(encoder.model, name, encoder.collector)
        for layer in encoder.layers:
            check_swappable(layer.module, layer.path, "forward")
            for name in (layer.keys, layer.first, layer.last):
                check_swappable(layer.module.get_submodule(name), f"{layer.path}.{name}", "forward")
    return encoders


def new_vit_state(encoder: Encoder, config: ViTConfig) -> EncoderState:
    """The state that the layers of an encoder share.

    Raises:
        ConfigError: ``config.r`` is a sequence with another length than the list of layers.
    """
    return EncoderState(
        config,
        r=config.per_layer(len(encoder.layers)),
        protected=encoder.protected,
        mask=encoder.mask,
        by_keyword=encoder.by_keyword,
        unmerge=config.unmerge or encoder.averages,
    )


def patch_encoder(encoder: Encoder, state: EncoderState) -> None:
    """Patch an encoder from :func:`checked_encoders` that is not patched yet."""
    for index, layer in enumerate(encoder.layers):
        layer_state = LayerState(
            state, index, layer.path, (layer.keys, layer.first, layer.last), layer.head_dim
        )
        swap(layer.module, "forward", layer_call, layer_state)
        swap_parts(layer.module, layer_state)
    if encoder.collector:
        swap(encoder.model, encoder.collector, collecting_call, state)
    add_hook(encoder.model, begin, state)
