"""Qwen-Image and its ControlNets: joint attention; rotary positions (image, text), shared by the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import GridShape, Host, Layer, is_a, listed
from tokenmerge.models.dummy_inputs import blank
from tokenmerge.models.layout import Grid, Layout, TokenArgument
from tokenmerge.models.transformer import transformer_host

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
    return transformer_host(
        root,
        _example,
        listed(root, "transformer_blocks", _LAYERS),
        grid=_grid,
        sample_size=(128, 128),
        controlnet=is_a(root, _CONTROLNET),
        patch=2,
    )


def _grid(root: Any, arguments: Mapping[str, Any], last: Grid) -> GridShape:
    first = arguments["img_shapes"][0]
    pictures = first if isinstance(first, list) else [first]
    if len(pictures) != 1:
        raise UnsupportedModelError(
            f"img_shapes: expected one picture, got {len(pictures)}: {pictures}; further pictures to edit, "
            "or layers, cannot be merged yet: call remove_token_merging(pipe) first"
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
