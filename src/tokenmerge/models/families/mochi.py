"""Mochi 1: video, joint attention, learned rotary positions for each head."""

from __future__ import annotations

from typing import Any

from tokenmerge.models.base import Host, Layer, listed
from tokenmerge.models.family import Blank, transformer_host
from tokenmerge.models.layout import Layout, TokenArgument

CLASSES = ("MochiTransformer3DModel",)

_FRAMES = 4  # latent frames: 19 frames of video
# Tables [n, heads, d / 2], which attention broadcasts over the batch.
_POSITIONS = TokenArgument("image_rotary_emb", axes=(1,), batched=True, broadcasts_to=4)
_LAYERS = (Layer("attn1", "attn1", Layout(text="last", token_arguments=(_POSITIONS,))), Layer("ff", "ff"))


def describe(root: Any) -> Host:
    """Find the blocks."""
    return transformer_host(
        root,
        _example,
        listed(root, "transformer_blocks", _LAYERS),
        sample_size=(60, 106),
        latent_frames=_FRAMES,
        on_cpu=("pos_frequencies",),  # the model enters autocast for the device of this parameter
    )


def _example(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    words = config.max_sequence_length
    return {
        "hidden_states": zeros(config.in_channels, _FRAMES, height, width),
        "encoder_hidden_states": zeros(words, config.text_embed_dim),
        "encoder_attention_mask": zeros.full_mask(words),
    }
