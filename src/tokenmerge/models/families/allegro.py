"""Allegro: video, self- and cross-attention; each token has an index into tables of rotary positions."""

from __future__ import annotations

from typing import Any

import torch

from tokenmerge.models.base import KEY_MASK, Host, Layer, Layout, TokenArgument
from tokenmerge.models.family import Blank, listed, transformer_host

CLASSES = ("AllegroTransformer3DModel",)

# The argument for positions is (tables, for each token its indices in time, height and width).
_POSITIONS = TokenArgument("image_rotary_emb", axes=(1,), batched=True, element=1)
_ATTENTION = Layout(token_arguments=(_POSITIONS, KEY_MASK))
_LAYERS = (Layer("attn1", "attn1", _ATTENTION), Layer("attn2", "attn2"), Layer("ff", "ff"))


def describe(root: Any) -> Host:
    """Find the blocks."""
    config = root.config
    return transformer_host(
        root,
        listed(root, "transformer_blocks", _LAYERS),
        _positions,
        text=(512, config.caption_channels),
        text_mask="encoder_attention_mask",
        sample_size=(config.sample_height, config.sample_width),
        latent_frames=config.sample_frames,
    )


def _positions(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    frames = config.sample_frames // config.patch_size_t
    rows, columns = height // config.patch_size, width // config.patch_size
    axis = config.attention_head_dim // 3
    tables = [(torch.zeros(side, axis, device=root.device),) * 2 for side in (frames, rows, columns)]
    places = torch.zeros(1, frames * rows * columns, device=root.device, dtype=torch.int64)
    return {
        "hidden_states": zeros(config.in_channels, config.sample_frames, height, width),
        "image_rotary_emb": (tuple(tables), (places,) * 3),
    }
