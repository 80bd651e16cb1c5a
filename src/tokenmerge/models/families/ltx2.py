"""LTX-2: self- and cross-attention of video and of sound, which attend to each other.

Tokens of the video merge, and sound stays as it is. Each sample of a batch has its own rotary positions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import Arguments, Grid, Grids, Host, Layer, Layout, TokenArgument
from tokenmerge.models.family import Blank, listed, transformer_host
from tokenmerge.models.grids import in_tokens
from tokenmerge.ops.once import once

CLASSES = ("LTX2VideoTransformer3DModel",)

_FRAMES = 16  # latent frames: 121 frames of video
_SOUND = 126  # latent frames of the sound of such a video
_WORDS = 1024
# With given images, each token has a timestep.
_TIMES = tuple(
    TokenArgument(name, axes=(1,), batched=True) for name in ("temb", "temb_ca_scale_shift", "temb_ca_gate")
)
_MASK = "self_attention_mask"


def describe(root: Any) -> Host:
    """Find the blocks. Tokens of given images follow those of the video."""
    # Each head may have positions of its own: [b, heads, n, d].
    axis = 2 if root.config.rope_type == "split" else 1

    def positions(name: str) -> TokenArgument:
        return TokenArgument(name, axes=(axis,), batched=True)

    def mask(name: str) -> TokenArgument:
        return TokenArgument(name, axes=(-2, -1), batched=True)

    queries = positions("query_rotary_emb")
    layers = (
        Layer("attn1", "attn1", Layout(text="last", token_arguments=(queries, mask("attention_mask")))),
        Layer("attn2", "attn2", Layout(text="last")),
        Layer("attn2", "audio_to_video_attn", Layout(text="last", token_arguments=(queries,))),
        Layer("ff", "ff", Layout(text="last")),
    )
    both = (positions("video_rotary_emb"), positions("ca_video_rotary_emb"))
    block = Layout(text="last", token_arguments=(*both, *_TIMES, mask(_MASK)))
    return transformer_host(
        root,
        listed(
            root,
            "transformer_blocks",
            layers,
            layout=Layout(text="last"),
            block_layout=block,
            beside="audio_hidden_states",
        ),
        _others,
        words=_WORDS,
        grids=_grids,
        sample_size=(16, 24),
        latent_frames=_FRAMES,
    )


def _grids(root: Any, arguments: Arguments, last: Grid) -> Grids:
    sides: list[Any] = [arguments.get(name) for name in ("num_frames", "height", "width")]
    coordinates = arguments.get("video_coords")
    tokens = arguments["hidden_states"].shape[1]
    known = () if None in sides else (in_tokens(sides, root.config),)
    # A pipeline that draws a video in tiles gives the sides of the whole video.
    if known and (coordinates is None or math.prod(known[0]) == tokens):
        return known
    found: Grids = ()
    if coordinates is not None and not (coordinates.is_meta or torch.compiler.is_compiling()):
        found = once(coordinates, "grids", lambda: _read(coordinates[0].cpu()))
    if not found:
        raise UnsupportedModelError(
            "num_frames, height, width, video_coords: expected the size of the latents, or the places of the "
            f"tokens of frames of one size, got {', '.join(map(str, sides))} for {tokens} tokens; pass the "
            "size, call remove_token_merging(pipe) first, or compile the blocks of the model, with "
            "transformer.compile_repeated_blocks()"
        )
    return found


def _read(bounds: Tensor) -> Grids:
    """Return the grid of the frames that come first in ``[3, n]`` places, or ``[3, n, 2]`` bounds of these.

    Frames of a size that are not later than those before are images that were given.
    """
    places = bounds[..., 0] if bounds.ndim == 3 else bounds
    inside = (places[1:] != places[1:, :1]).any(dim=0).long()
    inside[0] = 1
    frame = int((inside == 0).int().argmax()) or len(inside)
    rows = len(places[1, :frame].unique())
    if frame % rows or places.shape[1] < frame:
        return ()
    frames = 1
    while (frames + 1) * frame <= places.shape[1]:
        this_frame = places[:, frames * frame : (frames + 1) * frame]
        before = places[:, (frames - 1) * frame : frames * frame]
        if not torch.equal(this_frame[1:], before[1:]) or this_frame[0, 0] <= before[0, 0]:
            break
        frames += 1
    return ((frames, rows, frame // rows),)


def _others(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    # Later versions of the model get text that is projected already.
    video = config.caption_channels
    sound = config.caption_channels
    if not config.use_prompt_embeddings:
        video = config.cross_attention_dim
        sound = config.audio_cross_attention_dim
    return {
        "hidden_states": zeros(zeros.frames * height * width, config.in_channels),
        "audio_hidden_states": zeros(_SOUND, config.audio_in_channels),
        "encoder_hidden_states": zeros(_WORDS, video),
        "audio_encoder_hidden_states": zeros(_WORDS, sound),
        "timestep": zeros(1).fill_(500),
        "sigma": zeros().fill_(500),
        "encoder_attention_mask": zeros.full_mask(_WORDS),
        "audio_encoder_attention_mask": zeros.full_mask(_WORDS),
        "num_frames": zeros.frames,
        "height": height,
        "width": width,
        "audio_num_frames": _SOUND,
    }
