"""Wan 2.1 and 2.2: video, self- and cross-attention, rotary positions that broadcast over the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tokenmerge.layout import Follower, Grid, Layout
from tokenmerge.models.base import Block, GridShape, Host, Layer, is_a

__all__ = ["CLASSES", "describe", "matches"]

CLASSES = ("WanTransformer3DModel",)

_LAYERS = (
    Layer("attn1", "attn1", Layout(followers=(Follower("rotary_emb", axes=(1,), batched=True),))),
    Layer("attn2", "attn2"),
    Layer("ff", "ffn"),
)


def matches(module: nn.Module) -> bool:
    """Whether this file knows the model."""
    return is_a(module, *CLASSES)


def describe(root: Any) -> Host:
    """Find the blocks."""
    return Host(
        root=root,
        blocks=tuple(Block(f"blocks.{i}", block, _LAYERS) for i, block in enumerate(root.blocks)),
        sample="hidden_states",
        timestep="timestep",
        grid=_grid,
        sample_size=(60, 104),
        controlnet=False,
        example=lambda height, width, batch: _example(root, height, width, batch),
        patch=root.config.patch_size[1],
    )


def _grid(root: Any, arguments: Mapping[str, Any], last: Grid) -> GridShape:
    sides = zip(arguments["hidden_states"].shape[2:], root.config.patch_size, strict=True)
    frames, rows, columns = (side // patch for side, patch in sides)
    return frames, rows, columns


def _example(root: Any, height: int, width: int, batch: int) -> dict[str, Any]:
    config, like = root.config, {"device": root.device, "dtype": root.dtype}
    arguments = {
        "hidden_states": torch.zeros(batch, config.in_channels, 21, height, width, **like),
        "timestep": torch.full((batch,), 500.0, device=root.device),
        "encoder_hidden_states": torch.zeros(batch, 512, config.text_dim, **like),
    }
    if config.image_dim is not None:
        arguments["encoder_hidden_states_image"] = torch.zeros(batch, 257, config.image_dim, **like)
    return arguments
