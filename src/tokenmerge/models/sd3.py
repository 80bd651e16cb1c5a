"""Stable Diffusion 3 and 3.5: joint attention of image and text, no position tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tokenmerge.layout import Grid
from tokenmerge.models.base import Block, GridShape, Host, Layer, is_a

__all__ = ["CLASSES", "describe", "matches"]

CLASSES = ("SD3Transformer2DModel",)

# Some blocks of 3.5 medium have a second self-attention, of the image alone.
_LAYERS = (Layer("attn1", "attn"), Layer("attn1", "attn2"), Layer("ff", "ff"))


def matches(module: nn.Module) -> bool:
    """Whether this file knows the model."""
    return is_a(module, *CLASSES)


def describe(root: Any) -> Host:
    """Find the blocks."""
    return Host(
        root=root,
        blocks=tuple(
            Block(
                f"transformer_blocks.{i}",
                block,
                tuple(layer for layer in _LAYERS if getattr(block, layer.name, None) is not None),
            )
            for i, block in enumerate(root.transformer_blocks)
        ),
        sample="hidden_states",
        timestep="timestep",
        grid=_grid,
        sample_size=(root.config.sample_size,) * 2,
        controlnet=False,
        example=lambda height, width, batch: _example(root, height, width, batch),
        patch=root.config.patch_size,
    )


def _grid(root: Any, arguments: Mapping[str, Any], last: Grid) -> GridShape:
    height, width = arguments["hidden_states"].shape[-2:]
    return 1, height // root.config.patch_size, width // root.config.patch_size


def _example(root: Any, height: int, width: int, batch: int) -> dict[str, Any]:
    config, like = root.config, {"device": root.device, "dtype": root.dtype}
    return {
        "hidden_states": torch.zeros(batch, config.in_channels, height, width, **like),
        "timestep": torch.full((batch,), 500.0, device=root.device),
        "encoder_hidden_states": torch.zeros(batch, 77 + 256, config.joint_attention_dim, **like),
        "pooled_projections": torch.zeros(batch, config.pooled_projection_dim, **like),
    }
