"""LTX-Video: self- and cross-attention; each sample of a batch has its own rotary positions."""

from __future__ import annotations

from typing import Any

import torch

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import (
    OWN_POSITIONS,
    Arguments,
    Grid,
    Grids,
    Host,
    Layer,
    Layout,
    TokenArgument,
)
from tokenmerge.models.family import Blank, listed, transformer_host
from tokenmerge.models.grids import grids_of_coordinates, in_tokens

CLASSES = ("LTXVideoTransformer3DModel",)

_FRAMES = 21  # latent frames: 161 frames of video
# Tokens of given images stand before the tokens of the video.
_ATTENTION = Layout(text="first", token_arguments=(OWN_POSITIONS,))
# With given images, each token has a timestep.
_TIMES = TokenArgument("temb", axes=(1,), batched=True)
_BLOCK = Layout(text="first", token_arguments=(OWN_POSITIONS, _TIMES))
_LAYERS = (Layer("attn1", "attn1", _ATTENTION), Layer("attn2", "attn2"), Layer("ff", "ff"))


def describe(root: Any) -> Host:
    """Find the blocks."""
    return transformer_host(
        root,
        listed(root, "transformer_blocks", _LAYERS, block_layout=_BLOCK),
        _others,
        text=(128, root.config.caption_channels),
        text_mask="encoder_attention_mask",
        grids=_grids,
        sample_size=(16, 22),
        latent_frames=_FRAMES,
    )


def _grids(root: Any, arguments: Arguments, last: Grid) -> Grids:
    sides: list[Any] = [arguments.get(name) for name in ("num_frames", "height", "width")]
    coordinates = arguments.get("video_coords")
    # Where coordinates are given, some pipelines leave the sides out, and others set them to 1.
    if coordinates is not None and set(sides) <= {None, 1} and not torch.compiler.is_compiling():
        return grids_of_coordinates(coordinates)
    if None in sides:
        raise UnsupportedModelError(
            "num_frames, height, width: expected the size of the latents, got "
            f"{', '.join(map(str, sides))}; pass them. The token grid is read from video_coords only outside "
            "torch.compile: compile the blocks of the model, with transformer.compile_repeated_blocks()"
        )
    return (in_tokens(sides, root.config),)


def _others(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    return {
        "hidden_states": zeros(zeros.frames * height * width, root.config.in_channels),
        "timestep": zeros(1).fill_(500),
        "num_frames": zeros.frames,
        "height": height,
        "width": width,
    }
