"""Cosmos Predict: video, self- and cross-attention; the whole batch shares its rotary positions."""

from __future__ import annotations

from typing import Any

from tokenmerge.models.base import ROTARY, Host, Layer
from tokenmerge.models.family import Blank, listed, transformer_host

CLASSES = ("CosmosTransformer3DModel",)

_FRAMES = 16  # latent frames: 121 frames of video
_LAYERS = (Layer("attn1", "attn1", ROTARY), Layer("attn2", "attn2"), Layer("ff", "ff"))


def describe(root: Any) -> Host:
    """Find the blocks."""
    blocks = listed(root, "transformer_blocks", _LAYERS)
    return transformer_host(root, blocks, _others, sample_size=(88, 160), latent_frames=_FRAMES)


def _others(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    text_dim = config.crossattn_proj_in_channels if config.use_crossattn_projection else config.text_embed_dim
    # One of `in_channels` is the mask of frames that are given. The padding mask is an extra channel.
    arguments: dict[str, Any] = {
        "hidden_states": zeros(config.in_channels - 1, _FRAMES, height, width),
        "condition_mask": zeros(1, _FRAMES, height, width),
        "encoder_hidden_states": zeros(512, text_dim),
    }
    if config.img_context_dim_in:
        picture = zeros(config.img_context_num_tokens, config.img_context_dim_in)
        arguments["encoder_hidden_states"] = (arguments["encoder_hidden_states"], picture)
    if config.concat_padding_mask:
        arguments["padding_mask"] = arguments["hidden_states"].new_zeros(1, 1, height * 8, width * 8)
    return arguments
