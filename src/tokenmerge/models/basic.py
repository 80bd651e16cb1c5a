"""``BasicTransformerBlock``: the block of UNets and of the first diffusion transformers."""

from __future__ import annotations

from typing import Any

from torch import nn

from tokenmerge.layout import Follower, Layout
from tokenmerge.models.base import Block, Layer

__all__ = ["basic_block"]

_SELF_ATTENTION = Layout(followers=(Follower("attention_mask", axes=(-1,), batched=True),))
# The mask that it gets is the text's.
_CROSS_ATTENTION = Layout(whole=("ip_adapter_masks",))
_CHUNKED = "feed-forward layers that run in chunks stay dense; switch chunking off to merge them"


def basic_block(
    path: str, module: Any, *, grid: nn.Module | None = None, level: int = 1, method: str = "forward"
) -> Block:
    """Describe a block whose sub-layers are called ``attn1``, ``attn2`` and ``ff``."""
    # Blocks without text, as one of three in AudioLDM 2, attend to the image twice; those with
    # only_cross_attention attend to the text twice.
    twice_to_image = not getattr(getattr(module, "attn2", None), "is_cross_attention", True)
    twice_to_text = getattr(module, "only_cross_attention", False)
    layers = (
        Layer("attn1", "attn1", _CROSS_ATTENTION)
        if twice_to_text
        else Layer("attn1", "attn1", _SELF_ATTENTION, keys="encoder_hidden_states"),
        Layer("attn1", "attn2", _SELF_ATTENTION)
        if twice_to_image
        else Layer("attn2", "attn2", _CROSS_ATTENTION),
        Layer("ff", "ff"),
    )
    chunked = bool(getattr(module, "_chunk_size", None))
    return Block(
        path,
        module,
        tuple(
            layer
            for layer in layers
            if getattr(module, layer.name, None) is not None and not (chunked and layer.kind == "ff")
        ),
        wide=None if chunked else _SELF_ATTENTION,
        method=method,
        grid=grid,
        level=level,
        dense={"ff": _CHUNKED} if chunked else {},
    )
