"""PRX: the image attends to itself and to the text; the MLP is part of the block's own forward."""

from __future__ import annotations

from typing import Any

from tokenmerge.models.base import Host, Layer, Layout, TokenArgument
from tokenmerge.models.family import listed, transformer_host

CLASSES = ("PRXTransformer2DModel",)

# Rotary positions [b, 1, n, d / 2, 2, 2].
_POSITIONS = TokenArgument("image_rotary_emb", axes=(2,), batched=True)
_LAYERS = (Layer("attn1", "attention", Layout(token_arguments=(_POSITIONS,))),)
_NO_LAYER = "the MLP of PRX is not a separate layer; merge_mlp leaves it dense"


def describe(root: Any) -> Host:
    """Find the blocks."""
    blocks = listed(root, "blocks", _LAYERS, dense={"ff": _NO_LAYER})
    text = 256, root.config.context_in_dim
    return transformer_host(root, blocks, text=text, text_mask="attention_mask", sample_size=(64, 64))
