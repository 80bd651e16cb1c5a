"""``BasicTransformerBlock``: the block of UNets and of the first diffusion transformers."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from tokenmerge.models.base import Block, Layer
from tokenmerge.models.layout import KEY_MASK, Layout

_SELF_ATTENTION = Layout(token_arguments=(KEY_MASK,))
# The attention mask of cross-attention covers the text, so it has no entries for image tokens.
_CROSS_ATTENTION = Layout(dense_if=("ip_adapter_masks",))
# A block gets the masks of an IP-Adapter inside ``cross_attention_kwargs``.
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
) -> Block:
    """Describe a block whose sub-layers are called ``attn1``, ``attn2`` and ``ff``.

    ``context`` is the name of the argument that gives its self-attention other keys and values. The other
    arguments are fields of :class:`Block`.
    """
    # In blocks without text, such as every third one of AudioLDM 2, both attentions attend to the image. In
    # blocks with only_cross_attention, both attend to the text.
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
    )
