"""Wan 2.1 and 2.2 (also VACE, Animate), SkyReels-V2 and ChronoEdit: video, self- and cross-attention.

Rotary positions are broadcast over the batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tokenmerge.models.base import Host, Layer, Layout, TokenArgument, is_a
from tokenmerge.models.family import Blank, listed, transformer_host

CLASSES = (
    "WanTransformer3DModel",
    "WanVACETransformer3DModel",
    "WanAnimateTransformer3DModel",
    "SkyReelsV2Transformer3DModel",
    "ChronoEditTransformer3DModel",
)

_FRAMES = 21  # latent frames: 81 frames of video
_POSITIONS = TokenArgument("rotary_emb", axes=(1,), batched=True)
# Image-to-video models of Wan 2.2 have a timestep for each token.
_TIMES = TokenArgument("temb", axes=(1,), batched=True, ndim=4)
_BLOCK = Layout(token_arguments=(_POSITIONS, _TIMES))
# SkyReels-V2 can mask later frames.
_MASK = TokenArgument("attention_mask", axes=(-2, -1), batched=True)
_ATTENTION = Layout(token_arguments=(_POSITIONS, _MASK))
_SKYREELS_BLOCK = Layout(token_arguments=(_POSITIONS, _MASK, replace(_TIMES, axes=(2,))))
_LAYERS = (Layer("attn1", "attn1", _ATTENTION), Layer("attn2", "attn2"), Layer("ff", "ffn"))
# Control blocks return what other blocks add to their tokens, and the tokens of the next control block. The
# first one adds the tokens of the video.
_VIDEO = TokenArgument("hidden_states", axes=(1,), batched=True, combined=True)
_CONTROL = Layout("control_hidden_states", token_arguments=(_POSITIONS, _VIDEO), outputs=(1, 0))


def describe(root: Any) -> Host:
    """Find the blocks. VACE has further blocks for the control video."""
    block_layout = _SKYREELS_BLOCK if is_a(root, "SkyReelsV2Transformer3DModel") else _BLOCK
    blocks = listed(root, "blocks", _LAYERS, block_layout=block_layout)
    if is_a(root, "WanVACETransformer3DModel"):
        # They are not skipped, since more than the next of them reads what they return.
        control = listed(
            root, "vace_blocks", _LAYERS, layout=_CONTROL, block_layout=_CONTROL, skippable=False
        )
        blocks = (*control, *blocks)
    text = 512, root.config.text_dim
    return transformer_host(root, blocks, _others, text=text, sample_size=(60, 104), latent_frames=_FRAMES)


def _others(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    frames = zeros.frames - zeros.frames % getattr(config, "num_frame_per_block", 1)
    arguments: dict[str, Any] = {"hidden_states": zeros(config.in_channels, frames, height, width)}
    if config.image_dim is not None:
        arguments["encoder_hidden_states_image"] = zeros(257, config.image_dim)
    if is_a(root, "WanVACETransformer3DModel"):
        arguments["control_hidden_states"] = zeros(config.vace_in_channels, frames, height, width)
    if is_a(root, "WanAnimateTransformer3DModel"):
        # Every latent frame but the first has a pose, and four frames of a face video.
        arguments["pose_hidden_states"] = zeros(config.latent_channels, frames - 1, height, width)
        side = config.motion_encoder_size
        arguments["face_pixel_values"] = zeros(3, 4 * (frames - 2) + 1, side, side)
    if getattr(config, "inject_sample_info", False):
        arguments["fps"] = [0] * zeros.batch
    return arguments
