"""Cosmos Predict: video, self- and cross-attention; rotary positions shared by the batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tokenmerge.models.base import Host, Layer, listed
from tokenmerge.models.dummy_inputs import blank
from tokenmerge.models.grids import video_grid
from tokenmerge.models.layout import Layout, TokenArgument

__all__ = ["CLASSES", "describe"]

CLASSES = ("CosmosTransformer3DModel",)

_FRAMES = 16  # of the latents: 121 pictures
_LAYERS = (
    Layer("attn1", "attn1", Layout(token_arguments=(TokenArgument("image_rotary_emb", axes=(0,)),))),
    Layer("attn2", "attn2"),
    Layer("ff", "ff"),
)


def describe(root: Any) -> Host:
    """Find the blocks."""
    return Host(
        root=root,
        blocks=listed(root, "transformer_blocks", _LAYERS),
        sample="hidden_states",
        timestep="timestep",
        grid=video_grid,
        sample_size=(88, 160),
        controlnet=False,
        example=partial(_example, root),
        patch=root.config.patch_size[1],
        frames=_FRAMES // root.config.patch_size[0],
    )


def _example(root: Any, height: int, width: int, batch: int) -> dict[str, Any]:
    config, zeros = root.config, blank(root, batch)
    text_dim = config.crossattn_proj_in_channels if config.use_crossattn_projection else config.text_embed_dim
    # One of the channels says which frames are given; the padding mask is one more.
    arguments: dict[str, Any] = {
        "hidden_states": zeros(config.in_channels - 1, _FRAMES, height, width),
        "condition_mask": zeros(1, _FRAMES, height, width),
        "timestep": torch.full_like(zeros(), 0.5),
        "encoder_hidden_states": zeros(512, text_dim),
    }
    if config.img_context_dim_in:
        picture = zeros(config.img_context_num_tokens, config.img_context_dim_in)
        arguments["encoder_hidden_states"] = (arguments["encoder_hidden_states"], picture)
    if config.concat_padding_mask:
        arguments["padding_mask"] = arguments["hidden_states"].new_zeros(1, 1, height * 8, width * 8)
    return arguments
