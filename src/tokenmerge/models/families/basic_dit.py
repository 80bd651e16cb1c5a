"""Diffusion transformers made of ``BasicTransformerBlock``: DiT, PixArt-α and -Σ, Latte."""

from __future__ import annotations

from typing import Any

from tokenmerge.models.base import Host, is_a
from tokenmerge.models.family import Blank, basic_blocks, transformer_host

CLASSES = ("DiTTransformer2DModel", "PixArtTransformer2DModel", "LatteTransformer3DModel")


def describe(root: Any) -> Host:
    """Find the blocks. Of Latte, these are the spatial blocks, whose batch axis holds the frames."""
    return transformer_host(root, basic_blocks(root, "transformer_blocks"), _others)


def _others(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    if is_a(root, "DiTTransformer2DModel"):
        return {"class_labels": zeros.integers()}
    text_width = config.caption_channels or config.cross_attention_dim
    if is_a(root, "LatteTransformer3DModel"):
        return {
            "hidden_states": zeros(config.in_channels, config.video_length, height, width),
            "encoder_hidden_states": zeros(120, text_width),
        }
    sizes = {"resolution": zeros(2), "aspect_ratio": zeros(1)} if root.use_additional_conditions else {}
    return {
        "encoder_hidden_states": zeros(300, text_width),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None, **sizes},
    }
