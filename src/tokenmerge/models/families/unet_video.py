"""Video UNets: AnimateDiff and its SparseCtrl, ModelScope, I2VGen-XL, Stable Video Diffusion.

Each frame merges on its own, in the blocks that attend within it. Blocks that attend over time stay dense.
"""

from __future__ import annotations

from typing import Any

from tokenmerge.models.base import Host, is_a
from tokenmerge.models.families.unet import added_conditions, condition_picture
from tokenmerge.models.family import Blank
from tokenmerge.models.unet_stages import describe_stages

_SPARSECTRL = "SparseControlNetModel"
CLASSES = (
    "UNetMotionModel",
    _SPARSECTRL,
    "UNet3DConditionModel",
    "I2VGenXLUNet",
    "UNetSpatioTemporalConditionModel",
)
_FRAMES = 16


def describe(root: Any) -> Host:
    """Find the spatial blocks."""
    stable_video = is_a(root, "UNetSpatioTemporalConditionModel")
    return describe_stages(
        root, _example_of_stable_video if stable_video else _example, controlnet=is_a(root, _SPARSECTRL)
    )


def _example(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    motion = is_a(root, "UNetMotionModel", _SPARSECTRL)
    frames = min(_FRAMES, config.motion_max_seq_length) if motion else _FRAMES
    sample = zeros(config.in_channels, frames, height, width)
    text = zeros(77, config.cross_attention_dim)
    arguments = {
        "sample": sample,
        # AnimateDiff takes the text once for each frame.
        "encoder_hidden_states": text.repeat_interleave(frames, dim=0) if motion else text,
        **added_conditions(root, zeros),
    }
    if is_a(root, _SPARSECTRL):
        size: tuple[int, ...] = (height, width)
        if not config.use_simplified_condition_embedding:
            widths = config.conditioning_embedding_out_channels
            size = condition_picture(zeros, 1, widths, height, width).shape[-2:]
        arguments["controlnet_cond"] = zeros(config.conditioning_channels, frames, *size)
        arguments["conditioning_mask"] = zeros(1, frames, *size)
    if is_a(root, "I2VGenXLUNet"):
        arguments["fps"] = zeros.integers().fill_(16)
        arguments["image_latents"] = zeros(*sample.shape[1:])
        arguments["image_embeddings"] = zeros(config.cross_attention_dim)
    return arguments


def _example_of_stable_video(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    sample = zeros(config.num_frames, config.in_channels, height, width)
    picture = config.cross_attention_dim
    return {
        "sample": sample,
        "encoder_hidden_states": zeros(1, picture[0] if isinstance(picture, list | tuple) else picture),
        "added_time_ids": zeros(
            config.projection_class_embeddings_input_dim // config.addition_time_embed_dim
        ),
    }
