"""Sana and its ControlNet: linear self-attention, and an MLP made of convolutions."""

from __future__ import annotations

from typing import Any

from tokenmerge.models.base import Host, Layer, is_a
from tokenmerge.models.family import Blank, listed, transformer_host

_CONTROLNET = "SanaControlNetModel"
CLASSES = ("SanaTransformer2DModel", _CONTROLNET)

_LAYERS = (Layer("attn1", "attn1"), Layer("attn2", "attn2"))
_CONVOLUTIONS = "the MLP of Sana convolves the whole token grid; merge_mlp leaves it dense"
_LITTLE_TO_GAIN = "the attention of Sana is linear in the number of tokens, so merging gains little"


def describe(root: Any) -> Host:
    """Find the blocks."""
    return transformer_host(
        root,
        listed(root, "transformer_blocks", _LAYERS, dense={"ff": _CONVOLUTIONS}),
        _condition if is_a(root, _CONTROLNET) else None,
        text=(300, root.config.caption_channels),
        limits=(_LITTLE_TO_GAIN,),
    )


def _condition(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    return {"controlnet_cond": zeros(root.config.in_channels, height, width)}
