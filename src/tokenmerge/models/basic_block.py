"""``BasicTransformerBlock``: the block of UNets and of the first diffusion transformers."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from tokenmerge.models.base import Block, Layer
from tokenmerge.models.layout import Layout, TokenArgument

__all__ = ["basic_block"]

_SELF_ATTENTION = Layout(token_arguments=(TokenArgument("attention_mask", axes=(-1,), batched=True),))
# The mask that it gets is the text's.
_CROSS_ATTENTION = Layout(dense_if=("ip_adapter_masks",))
# Its masks of an IP-Adapter are within its ``cross_attention_kwargs``.
_BLOCK = dataclasses.replace(_SELF_ATTENTION, dense_if=("ip_adapter_masks",))
_CHUNKED = "feed-forward layers that run in chunks stay dense; switch chunking off to merge them"


def basic_block(
    path: str,
    module: Any,
    *,
    grid: nn.Module | None = None,
    level: int = 1,
    method: str = "forward",
    context: str = "encoder_hidden_states",
    stack: str | None = None,
) -> Block:
    """Describe a block whose sub-layers are called ``attn1``, ``attn2`` and ``ff``.

    Args:
        path: as for a :class:`Block`, and ``grid``, ``level`` and ``method``.
        module: the block.
        grid: the module around it.
        level: its resolution level.
        method: what checkpointing runs again.
        context: name of the argument by which its attention is given something else to look at.
        stack: as for a :class:`Block`.
    """
    # Blocks without text, as one of three in AudioLDM 2, attend to the image twice; those with
    # only_cross_attention attend to the text twice.
    twice_to_image = not getattr(getattr(module, "attn2", None), "is_cross_attention", True)
    twice_to_text = getattr(module, "only_cross_attention", False)
    layers = (
        Layer("attn1", "attn1", _CROSS_ATTENTION, own_keys=False)
        if twice_to_text
        else Layer("attn1", "attn1", _SELF_ATTENTION, keys=context),
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
        block_layout=None if chunked else _BLOCK,
        method=method,
        grid=grid,
        level=level,
        dense={"ff": _CHUNKED} if chunked else {},
        stack=stack,
    )
