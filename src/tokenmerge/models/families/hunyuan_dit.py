"""Hunyuan-DiT and its ControlNet: self- and cross-attention, rotary positions shared by the batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tokenmerge.models.base import Host, Layer, is_a, listed
from tokenmerge.models.dummy_inputs import blank
from tokenmerge.models.grids import picture_grid
from tokenmerge.models.layout import Layout, TokenArgument

__all__ = ["CLASSES", "describe"]

_CONTROLNET = "HunyuanDiT2DControlNetModel"
CLASSES = ("HunyuanDiT2DModel", _CONTROLNET)

# Cross-attention turns its queries too, which are image tokens.
_ATTENTION = Layout(token_arguments=(TokenArgument("image_rotary_emb", axes=(0,)),))
_LAYERS = (Layer("attn1", "attn1", _ATTENTION), Layer("attn2", "attn2", _ATTENTION), Layer("ff", "ff"))


def describe(root: Any) -> Host:
    """Find the blocks."""
    return Host(
        root=root,
        blocks=listed(root, "blocks", _LAYERS),
        sample="hidden_states",
        timestep="timestep",
        grid=picture_grid,
        sample_size=(root.config.sample_size,) * 2,
        controlnet=is_a(root, _CONTROLNET),
        example=partial(_example, root),
        patch=root.config.patch_size,
    )


def _example(root: Any, height: int, width: int, batch: int) -> dict[str, Any]:
    config, zeros = root.config, blank(root, batch)
    sample = zeros(config.in_channels, height, width)
    tokens = (height // config.patch_size) * (width // config.patch_size)
    arguments = {
        "hidden_states": sample,
        "timestep": torch.full_like(zeros(), 500),
        "encoder_hidden_states": zeros(config.text_len, config.cross_attention_dim),
        "text_embedding_mask": zeros(config.text_len),
        "encoder_hidden_states_t5": zeros(config.text_len_t5, config.cross_attention_dim_t5),
        "text_embedding_mask_t5": zeros(config.text_len_t5),
        "image_rotary_emb": (sample.new_zeros(tokens, config.attention_head_dim),) * 2,
    }
    if config.use_style_cond_and_image_meta_size:
        arguments["image_meta_size"] = zeros(6)
        arguments["style"] = torch.zeros(batch, device=sample.device, dtype=torch.int64)
    if is_a(root, _CONTROLNET):
        arguments["controlnet_cond"] = torch.zeros_like(sample)
    return arguments
