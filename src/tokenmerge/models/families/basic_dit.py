"""Diffusion transformers made of ``BasicTransformerBlock``: DiT, PixArt-α and -Σ, Latte."""

from __future__ import annotations

from typing import Any

from tokenmerge.models.base import Host, is_a
from tokenmerge.models.basic_block import basic_block
from tokenmerge.models.family import Blank, transformer_host

CLASSES = ("DiTTransformer2DModel", "PixArtTransformer2DModel", "LatteTransformer3DModel")


def describe(root: Any) -> Host:
    """Find the blocks. Of Latte, these are the spatial blocks, whose batch axis holds the frames."""
    blocks = tuple(
        basic_block(f"transformer_blocks.{i}", block) for i, block in enumerate(root.transformer_blocks)
    )
    return transformer_host(root, _example, blocks)


def _example(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    video = (config.video_length,) if is_a(root, "LatteTransformer3DModel") else ()
    sample = zeros(config.in_channels, *video, height, width)
    arguments: dict[str, Any] = {"hidden_states": sample}
    if is_a(root, "DiTTransformer2DModel"):
        arguments["class_labels"] = zeros.integers()
        return arguments
    arguments["encoder_hidden_states"] = zeros(
        120 if video else 300, config.caption_channels or config.cross_attention_dim
    )
    if is_a(root, "PixArtTransformer2DModel"):
        sizes = {"resolution": zeros(2), "aspect_ratio": zeros(1)} if root.use_additional_conditions else {}
        arguments["added_cond_kwargs"] = {"resolution": None, "aspect_ratio": None, **sizes}
    return arguments
