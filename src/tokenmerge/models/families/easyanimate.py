"""EasyAnimate: video, joint attention with the text before the image."""

from __future__ import annotations

from typing import Any

from tokenmerge.models.base import ROTARY, Block, Host, Layer
from tokenmerge.models.family import Blank, transformer_host

CLASSES = ("EasyAnimateTransformer3DModel",)

_ATTENTION = Layer("attn1", "attn1", ROTARY)
_SHARED = "blocks with one MLP run it on the image and then on the text; merge_mlp leaves it dense"


def describe(root: Any) -> Host:
    """Find the blocks."""
    config = root.config
    return transformer_host(
        root,
        tuple(_block(f"transformer_blocks.{i}", block) for i, block in enumerate(root.transformer_blocks)),
        _second_text,
        text=(256, config.text_embed_dim),
        sample_size=(config.sample_height, config.sample_width),
        latent_frames=13,  # 49 frames of video
    )


def _block(path: str, block: Any) -> Block:
    if block.txt_ff is None:
        return Block(path, block, (_ATTENTION,), dense={"ff": _SHARED})
    return Block(path, block, (_ATTENTION, Layer("ff", "ff")))


def _second_text(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    if root.text_proj_t5 is None:
        return {}
    return {"encoder_hidden_states_t5": zeros(256, root.config.text_embed_dim_t5)}
