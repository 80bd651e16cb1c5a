"""Mochi 1: video, joint attention, learned rotary positions for each head."""

from __future__ import annotations

from typing import Any

from tokenmerge.models.base import Host, Layer, Layout, TokenArgument
from tokenmerge.models.family import listed, transformer_host

CLASSES = ("MochiTransformer3DModel",)

# Tables [n, heads, d / 2], which attention broadcasts over the batch.
_POSITIONS = TokenArgument("image_rotary_emb", axes=(1,), batched=True, broadcasts_to=4)
_LAYERS = (Layer("attn1", "attn1", Layout(text="last", token_arguments=(_POSITIONS,))), Layer("ff", "ff"))


def describe(root: Any) -> Host:
    """Find the blocks."""
    return transformer_host(
        root,
        listed(root, "transformer_blocks", _LAYERS),
        text=(root.config.max_sequence_length, root.config.text_embed_dim),
        text_mask="encoder_attention_mask",
        sample_size=(60, 106),
        latent_frames=4,  # 19 frames of video
        on_cpu=("pos_frequencies",),  # the model enters autocast for the device of this parameter
    )
