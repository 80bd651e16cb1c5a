"""Lumina-Image 2.0: separate refiners for text and image, then joint blocks with the text first."""

from __future__ import annotations

from typing import Any

from tokenmerge.models.base import OWN_POSITIONS, Host, Layer, Layout, TokenArgument
from tokenmerge.models.family import listed, transformer_host

CLASSES = ("Lumina2Transformer2DModel",)

# Sequences are as long as their texts; shorter ones are padded at the end.
_BLOCK = Layout(text="first", padding="attention_mask")
_ATTENTION = Layout(
    text="first",
    token_arguments=(OWN_POSITIONS, TokenArgument("attention_mask", axes=(1,), batched=True)),
    same_as_tokens="encoder_hidden_states",
)
_LAYERS = (Layer("attn1", "attn", _ATTENTION), Layer("ff", "feed_forward"))


def describe(root: Any) -> Host:
    """Find the blocks that see the image."""
    return transformer_host(
        root,
        (*listed(root, "noise_refiner", _LAYERS), *listed(root, "layers", _LAYERS, layout=_BLOCK)),
        text=(256, root.config.cap_feat_dim),
        text_mask="encoder_attention_mask",
    )
