"""Qwen-Image and its ControlNets: joint attention; rotary positions shared by the batch, text's apart."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import GridShape, Host, Layer, is_a, listed
from tokenmerge.models.dummy_inputs import blank
from tokenmerge.models.layout import Grid, Layout, TokenArgument

__all__ = ["CLASSES", "describe"]

_CONTROLNET = "QwenImageControlNetModel"
CLASSES = ("QwenImageTransformer2DModel", _CONTROLNET)

_LAYERS = (
    Layer(
        "attn1", "attn", Layout(token_arguments=(TokenArgument("image_rotary_emb", axes=(0,), element=0),))
    ),
    Layer("ff", "img_mlp"),
)


def describe(root: Any) -> Host:
    """Find the blocks."""
    return Host(
        root=root,
        blocks=listed(root, "transformer_blocks", _LAYERS),
        sample="hidden_states",
        timestep="timestep",
        grid=_grid,
        sample_size=(128, 128),
        controlnet=is_a(root, _CONTROLNET),
        example=partial(_example, root),
        patch=2,
    )


def _grid(root: Any, arguments: Mapping[str, Any], last: Grid) -> GridShape:
    first = arguments["img_shapes"][0]
    pictures = first if isinstance(first, list) else [first]
    if len(pictures) != 1:
        raise UnsupportedModelError(
            f"img_shapes: expected one picture, got {len(pictures)}: {pictures}; pictures to edit and layers "
            "beside the one that is generated cannot be merged yet: call remove_token_merging(pipe) first"
        )
    frames, rows, columns = pictures[0]
    return frames, rows, columns


def _example(root: Any, height: int, width: int, batch: int) -> dict[str, Any]:
    config, zeros = root.config, blank(root, batch)
    rows, columns = height // 2, width // 2
    tokens = zeros(rows * columns, config.in_channels)
    arguments: dict[str, Any] = {
        "hidden_states": tokens,
        "timestep": torch.full_like(zeros(), 0.5),
        "encoder_hidden_states": zeros(512, config.joint_attention_dim),
        "img_shapes": [[(1, rows, columns)]] * batch,
    }
    if getattr(config, "guidance_embeds", False):
        arguments["guidance"] = torch.full_like(zeros(), 3.5)
    if getattr(config, "use_additional_t_cond", False):
        arguments["additional_t_cond"] = torch.zeros(batch, device=tokens.device, dtype=torch.int64)
    if is_a(root, _CONTROLNET):
        arguments["controlnet_cond"] = zeros(
            rows * columns, config.in_channels + config.extra_condition_channels
        )
    return arguments
