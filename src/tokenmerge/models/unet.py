"""UNets and ControlNets of diffusers: SD 1.x, 2.x, SDXL and what is derived from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tokenmerge.layout import Grid
from tokenmerge.models.base import Block, GridShape, Host, is_a
from tokenmerge.models.basic import basic_block

__all__ = ["CLASSES", "describe", "matches"]

CLASSES = ("UNet2DConditionModel", "ControlNetModel", "ControlNetUnionModel")


def matches(module: nn.Module) -> bool:
    """Whether this file knows the model."""
    return is_a(module, *CLASSES)


def describe(root: Any) -> Host:
    """Find the blocks of a UNet or ControlNet; the level halves and doubles with its samplers."""
    blocks: list[Block] = []
    level = 1
    for i, stage in enumerate(root.down_blocks):
        blocks += _blocks(stage, f"down_blocks.{i}", level)
        if stage.downsamplers is not None:
            level *= 2
    if root.mid_block is not None:
        blocks += _blocks(root.mid_block, "mid_block", level)
    for i, stage in enumerate(getattr(root, "up_blocks", ())):
        blocks += _blocks(stage, f"up_blocks.{i}", level)
        if stage.upsamplers is not None:
            level //= 2

    size = getattr(root.config, "sample_size", None)
    return Host(
        root=root,
        blocks=tuple(blocks),
        sample="sample",
        timestep="timestep",
        grid=_grid,
        sample_size=(size, size) if isinstance(size, int) else size and tuple(size),
        controlnet=is_a(root, "ControlNetModel", "ControlNetUnionModel"),
        example=lambda height, width, batch: _example(root, height, width, batch),
    )


def _blocks(stage: Any, prefix: str, level: int) -> Iterator[Block]:
    for path, module in stage.named_modules(prefix=prefix):
        if is_a(module, "Transformer2DModel"):
            for i, block in enumerate(module.transformer_blocks):
                yield basic_block(f"{path}.transformer_blocks.{i}", block, grid=module, level=level)


def _grid(root: Any, arguments: Mapping[str, Any], last: Grid) -> GridShape:
    rows, columns = arguments["sample"].shape[-2:]
    return 1, rows, columns


def _input_shape(projection: nn.Module) -> tuple[int, ...]:
    """Shape of one picture's embedding for a projection of an IP-Adapter."""
    first = next(layer for layer in projection.modules() if isinstance(layer, nn.Linear))
    # Projections of a whole picture take one vector, those of its patches a sequence of them.
    return (first.in_features,) if is_a(projection, "ImageProjection") else (257, first.in_features)


def _example(root: Any, height: int, width: int, batch: int) -> dict[str, Any]:
    config = root.config
    like = next(root.parameters())

    def tokens(*shape: int) -> torch.Tensor:
        return torch.zeros(batch, *shape, device=like.device, dtype=like.dtype)

    width_of_text = config.encoder_hid_dim or config.cross_attention_dim
    if isinstance(width_of_text, list | tuple):
        width_of_text = width_of_text[0]
    arguments: dict[str, Any] = {
        "sample": tokens(config.in_channels, height, width),
        "timestep": torch.ones(batch, device=like.device),
        "encoder_hidden_states": tokens(77, width_of_text),
    }
    if config.addition_embed_type == "text_time":
        times = 6 * config.addition_time_embed_dim
        arguments["added_cond_kwargs"] = {
            "text_embeds": tokens(config.projection_class_embeddings_input_dim - times),
            "time_ids": tokens(6),
        }
    if getattr(config, "encoder_hid_dim_type", None) == "ip_image_proj":
        projections = root.encoder_hid_proj.image_projection_layers
        arguments["added_cond_kwargs"] = {
            **arguments.get("added_cond_kwargs", {}),
            "image_embeds": [tokens(1, *_input_shape(projection)) for projection in projections],
        }
    if config.class_embed_type in ("projection", "simple_projection"):
        arguments["class_labels"] = tokens(config.projection_class_embeddings_input_dim)
    elif config.num_class_embeds is not None or config.class_embed_type is not None:
        arguments["class_labels"] = torch.zeros(batch, device=like.device, dtype=torch.int64)

    if is_a(root, "ControlNetModel", "ControlNetUnionModel"):
        # The condition is a picture; its embedding halves it once for each but the first of its widths.
        scale = 2 ** (len(config.conditioning_embedding_out_channels) - 1)
        picture = tokens(config.conditioning_channels, height * scale, width * scale)
        arguments["controlnet_cond"] = picture
        if is_a(root, "ControlNetUnionModel"):
            arguments["controlnet_cond"] = [picture]
            arguments["control_type"] = tokens(config.num_control_type)
            arguments["control_type_idx"] = [0]
            arguments["conditioning_scale"] = [1.0]
    return arguments
