"""EasyAnimate: video, joint attention with the text before the image."""

from __future__ import annotations

from typing import Any

from tokenmerge.models.base import Block, Host, Layer
from tokenmerge.models.family import Blank, transformer_host
from tokenmerge.models.layout import ROTARY

CLASSES = ("EasyAnimateTransformer3DModel",)

_FRAMES = 13  # latent frames: 49 frames of video
_ATTENTION = Layer("attn1", "attn1", ROTARY)
_SHARED = "blocks with one MLP run it on the image and then on the text; merge_mlp leaves it dense"


def describe(root: Any) -> Host:
    """Find the blocks."""
    return transformer_host(
        root,
        _example,
        tuple(_block(f"transformer_blocks.{i}", block) for i, block in enumerate(root.transformer_blocks)),
        sample_size=(root.config.sample_height, root.config.sample_width),
        latent_frames=_FRAMES,
    )


def _block(path: str, block: Any) -> Block:
    if block.txt_ff is None:
        return Block(path, block, (_ATTENTION,), dense={"ff": _SHARED})
    return Block(path, block, (_ATTENTION, Layer("ff", "ff")))


def _example(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    arguments = {
        "hidden_states": zeros(config.in_channels, _FRAMES, height, width),
        "encoder_hidden_states": zeros(256, config.text_embed_dim),
    }
    if root.text_proj_t5 is not None:
        arguments["encoder_hidden_states_t5"] = zeros(256, config.text_embed_dim_t5)
    return arguments
