"""Kandinsky 5: images and video with channels last; self- and cross-attention."""

from __future__ import annotations

from typing import Any

import torch

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import Arguments, Grid, Grids, Host, Layer, Layout, TokenArgument
from tokenmerge.models.family import Blank, listed, transformer_host
from tokenmerge.models.grids import in_tokens

CLASSES = ("Kandinsky5Transformer3DModel",)

_FRAMES = 31  # latent frames: 121 frames of video
_WORDS = 256
_ATTENTION = Layout(token_arguments=(TokenArgument("rotary_emb", axes=(1,), batched=True),))
_BLOCK = Layout(token_arguments=(TokenArgument("rope", axes=(1,), batched=True),))
_LAYERS = (
    Layer("attn1", "self_attention", _ATTENTION),
    Layer("attn2", "cross_attention"),
    Layer("ff", "feed_forward"),
)


def describe(root: Any) -> Host:
    """Find the blocks that see the video."""
    return transformer_host(
        root,
        listed(root, "visual_transformer_blocks", _LAYERS, block_layout=_BLOCK),
        _others,
        text=(_WORDS, root.config.in_text_dim),
        grids=_grids,
        sample_size=(64, 96),
        latent_frames=_FRAMES,
    )


def _grids(root: Any, arguments: Arguments, last: Grid) -> Grids:
    if arguments.get("sparse_params") is not None:
        raise UnsupportedModelError(
            "sparse_params: the mask of sparse attention is made for the full token grid, which merging "
            "shortens; use a checkpoint with full attention, or call remove_token_merging(pipe) first"
        )
    return (in_tokens(arguments["hidden_states"].shape[1:4], root.config),)


def _others(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    sides = in_tokens((zeros.frames, height, width), config)
    channels = 2 * config.in_visual_dim + 1 if config.visual_cond else config.in_visual_dim
    return {
        "hidden_states": zeros(zeros.frames, height, width, channels),
        "pooled_projections": zeros(config.in_text_dim2),
        "visual_rope_pos": [torch.arange(side, device=root.device) for side in sides],
        "text_rope_pos": torch.arange(_WORDS, device=root.device),
    }
