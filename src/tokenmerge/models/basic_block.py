"""``BasicTransformerBlock``: the block of UNets and of the first diffusion transformers."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from tokenmerge.models.base import KEY_MASK, Block, Layer, Layout, layers_in

_SELF_ATTENTION = Layout(token_arguments=(KEY_MASK,))
# The attention mask of cross-attention covers the text, so it has no entries for image tokens.
_CROSS_ATTENTION = Layout(dense_if=("ip_adapter_masks",))
# A block gets the masks of an IP-Adapter inside ``cross_attention_kwargs``.
_BLOCK = dataclasses.replace(_SELF_ATTENTION, dense_if=("ip_adapter_masks",))
_CHUNKED = "feed-forward layers that run in chunks stay dense; switch chunking off to merge them"


def basic_blocks(
    root: nn.Module, name: str, *, context: str = "encoder_hidden_states", **facts: Any
) -> tuple[Block, ...]:
    """Describe the blocks of one module list, whose sub-layers are called ``attn1``, ``attn2`` and ``ff``.

    ``context`` is the name of the argument that gives their self-attention other keys and values. ``facts``
    are fields of :class:`Block`.
    """
    blocks: Any = root.get_submodule(name)
    return tuple(_basic_block(f"{name}.{i}", block, context, facts) for i, block in enumerate(blocks))


def _basic_block(path: str, module: Any, context: str, facts: dict[str, Any]) -> Block:
    # In blocks without text, such as every third one of AudioLDM 2, both attentions attend to the image. In
    # blocks with only_cross_attention, both attend to the text.
    twice_to_image = not getattr(getattr(module, "attn2", None), "is_cross_attention", True)
    twice_to_text = getattr(module, "only_cross_attention", False)
    layers = [
        Layer("attn1", "attn1", _CROSS_ATTENTION, own_keys=False)
        if twice_to_text
        else Layer("attn1", "attn1", _SELF_ATTENTION, keys=context),
        Layer("attn1", "attn2", _SELF_ATTENTION)
        if twice_to_image
        else Layer("attn2", "attn2", _CROSS_ATTENTION),
    ]
    chunked = bool(getattr(module, "_chunk_size", None))
    if not chunked:
        layers.append(Layer("ff", "ff"))
    return Block(
        path,
        module,
        layers_in(module, layers),
        block_layout=None if chunked else _BLOCK,
        # The checkpointing of CompVis's repositories recomputes `_forward`.
        method="_forward" if hasattr(module, "_forward") else "forward",
        dense={"ff": _CHUNKED} if chunked else {},
        **facts,
    )
