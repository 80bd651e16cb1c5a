"""Mochi 1: video, joint attention, learned rotary positions for each head."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tokenmerge.models.base import Host, Layer, listed
from tokenmerge.models.dummy_inputs import blank, full_mask
from tokenmerge.models.grids import video_grid
from tokenmerge.models.layout import Layout, TokenArgument

__all__ = ["CLASSES", "describe"]

CLASSES = ("MochiTransformer3DModel",)

_FRAMES = 4  # of the latents: 19 pictures
# Tables [n, heads, d / 2], which its attention broadcasts over the batch.
_POSITIONS = TokenArgument("image_rotary_emb", axes=(1,), batched=True, expand=True)
_LAYERS = (Layer("attn1", "attn1", Layout(text="last", token_arguments=(_POSITIONS,))), Layer("ff", "ff"))


def describe(root: Any) -> Host:
    """Find the blocks."""
    return Host(
        root=root,
        blocks=listed(root, "transformer_blocks", _LAYERS),
        sample="hidden_states",
        timestep="timestep",
        grid=video_grid,
        sample_size=(60, 106),
        controlnet=False,
        example=partial(_example, root),
        patch=root.config.patch_size,
        frames=_FRAMES,
        on_cpu=("pos_frequencies",),  # it computes positions under autocast of their device
    )


def _example(root: Any, height: int, width: int, batch: int) -> dict[str, Any]:
    config, zeros = root.config, blank(root, batch)
    words = config.max_sequence_length
    return {
        "hidden_states": zeros(config.in_channels, _FRAMES, height, width),
        "timestep": torch.full_like(zeros(), 500),
        "encoder_hidden_states": zeros(words, config.text_embed_dim),
        "encoder_attention_mask": full_mask(root, batch, words),
    }
