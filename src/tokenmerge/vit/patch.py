"""Patching a vision transformer: which methods change, and the checks before."""

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
    layer_call,
    swap_parts,
)

__all__ = ["checked_encoders", "new_vit_state", "patch_encoder"]


def checked_encoders(model: object, config: ViTConfig) -> tuple[Encoder, ...]:
    """Find out, before anything is changed, that a model can be patched.

    Args:
        model: a model, or an object with models as attributes.
        config: what to merge and how much.

    Raises:
        UnsupportedModelError: there is no vision transformer that tokens can be merged in, or its attention
            back-end cannot attend in proportion to size.
        NothingToMergeError: it has no layers.
    """
    encoders = find_encoders(model)
    if not encoders:
        seen = ", ".join(sorted({type(part).__name__ for part in parts(model)} or {type(model).__name__}))
        names = ", ".join(name for f in FAMILIES for name in (f.model, *f.around, *f.averaging))
        raise UnsupportedModelError(
            f"no vision transformer to merge tokens in: found {seen}; pass a model of one of the classes "
            f"{names} (the last is that of timm), or for a diffusion model a ToMeConfig"
        )
    for encoder in encoders:
        name = type(encoder.model).__name__
        if not encoder.layers:
            raise NothingToMergeError(f"nothing to merge: {name} has no layers; pass a model that has")
        check_attention(encoder.model, config)
        for layer in encoder.layers:
            check_swappable(layer.module, layer.path, "forward")
            for name in (layer.keys, layer.norm, layer.mlp):
                check_swappable(layer.module.get_submodule(name), f"{layer.path}.{name}", "forward")
    return encoders


def new_vit_state(encoder: Encoder, config: ViTConfig) -> EncoderState:
    """What the layers of an encoder will share.

    Raises:
        ConfigError: ``config.r`` has not one number for each of them.
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
    """Patch an encoder of :func:`checked_encoders` that is not patched."""
    for index, layer in enumerate(encoder.layers):
        layer_state = LayerState(
            state, index, layer.path, (layer.keys, layer.norm, layer.mlp), layer.head_dim
        )
        swap(layer.module, "forward", layer_call, layer_state)
        swap_parts(layer.module, layer_state)
    add_hook(encoder.model, begin, state)
