"""UNets and their ControlNets, of images, sound and video: two levels that both merge."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from tests.models.family import TEXT, WORDS, Family, noise

FRAMES = 3
SIZE = {
    "sample_size": 8,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "cross_attention_dim": TEXT,
}
DOWN = {"down_block_types": ("CrossAttnDownBlock2D",) * 2}
IMAGE = {**SIZE, **DOWN, "up_block_types": ("CrossAttnUpBlock2D",) * 2, "attention_head_dim": 2}
CONDITIONED = {"conditioning_embedding_out_channels": (8, 8)}


def _unet(**changes: Any) -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(**{**IMAGE, **changes})


def _inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    return {
        "sample": noise(batch, 4, rows, columns),
        "timestep": torch.tensor(500),
        "encoder_hidden_states": noise(batch, WORDS, TEXT),
    }


def _and(**more: Callable[[int, int, int], Any]) -> Callable[[int, int, int], dict[str, Any]]:
    """The inputs of a UNet and others."""
    return lambda *size: {**_inputs(*size), **{name: make(*size) for name, make in more.items()}}


def _sdxl(**changes: Any) -> Any:
    return _unet(
        use_linear_projection=True,
        transformer_layers_per_block=(1, 2),
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=8 * 6 + TEXT,
        **changes,
    )


def _size_and_text(batch: int, rows: int, columns: int) -> dict[str, Any]:
    return {"text_embeds": noise(batch, TEXT), "time_ids": torch.ones(batch, 6)}


def _boxes(batch: int, rows: int, columns: int) -> dict[str, Any]:
    boxes = {
        "boxes": noise(batch, 2, 4),
        "positive_embeddings": noise(batch, 2, TEXT),
        "masks": torch.ones(batch, 2),
    }
    return {"gligen": boxes}


def _ip_adapter() -> Any:
    from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0
    from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection

    unet = _unet()
    projection = ImageProjection(image_embed_dim=8, cross_attention_dim=TEXT, num_image_text_embeds=2)
    unet.encoder_hid_proj = MultiIPAdapterImageProjection([projection])
    unet.register_to_config(encoder_hid_dim_type="ip_image_proj")
    for name, module in unet.named_modules():
        if name.endswith("attn2"):
            module.set_processor(IPAdapterAttnProcessor2_0(module.inner_dim, TEXT, num_tokens=(2,)))
    return unet


def _dreamlite() -> Any:
    from diffusers import DreamLiteUNetModel

    return DreamLiteUNetModel(
        **{
            **SIZE,
            "down_block_types": ("DreamLiteCrossAttnNoSelfAttnDownBlock2D", "DreamLiteCrossAttnDownBlock2D"),
            "up_block_types": ("DreamLiteCrossAttnUpBlock2D", "DreamLiteCrossAttnNoSelfAttnUpBlock2D"),
            "attention_head_dim": 2,
        }
    )


def _controlnet() -> Any:
    from diffusers import ControlNetModel

    return ControlNetModel(**_but(SIZE, "sample_size"), **DOWN, **CONDITIONED, attention_head_dim=2)


def _controlnet_union() -> Any:
    from diffusers import ControlNetUnionModel

    return ControlNetUnionModel(
        **_but(SIZE, "sample_size"),
        **DOWN,
        **CONDITIONED,
        attention_head_dim=2,
        num_control_type=2,
        num_trans_channel=16,
        num_trans_head=2,
        num_proj_channel=16,
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=16,
    )


def _but(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}


def _picture(batch: int, rows: int, columns: int) -> Any:
    return noise(batch, 3, 2 * rows, 2 * columns)


def _controlnet_xs() -> Any:
    from diffusers import UNetControlNetXSModel

    return UNetControlNetXSModel(
        **_but(SIZE, "layers_per_block"),
        **DOWN,
        up_block_types=("CrossAttnUpBlock2D",) * 2,
        num_attention_heads=2,
        ctrl_block_out_channels=(8, 16),
        ctrl_num_attention_heads=2,
        ctrl_conditioning_embedding_out_channels=(8, 8),
        ctrl_max_norm_num_groups=4,
    )


def _audioldm2() -> Any:
    from diffusers import AudioLDM2UNet2DConditionModel

    settings = {**IMAGE, "cross_attention_dim": ((None, TEXT, TEXT + 8), (None, TEXT, TEXT + 8))}
    return AudioLDM2UNet2DConditionModel(**settings)


MOTION = {
    **_but(SIZE, "sample_size"),
    "down_block_types": ("CrossAttnDownBlockMotion",) * 2,
    "num_attention_heads": 2,
    "motion_num_attention_heads": 2,
    "motion_max_seq_length": 4,
}


def _motion() -> Any:
    from diffusers import UNetMotionModel

    return UNetMotionModel(**MOTION, sample_size=8, up_block_types=("CrossAttnUpBlockMotion",) * 2)


def _free_noise() -> Any:
    """A UNet as AnimateDiff's pipelines set it up for long videos, with split inference to save memory."""
    from diffusers.pipelines.free_noise_utils import AnimateDiffFreeNoiseMixin

    pipe = AnimateDiffFreeNoiseMixin()
    pipe.unet = _motion()
    pipe.device, pipe.dtype = pipe.unet.device, pipe.unet.dtype
    pipe.motion_adapter = SimpleNamespace(config=pipe.unet.config)
    pipe.enable_free_noise(context_length=2, context_stride=1)
    pipe.enable_free_noise_split_inference(spatial_split_size=256, temporal_split_size=4)
    return pipe.unet


def _sparsectrl() -> Any:
    from diffusers import SparseControlNetModel

    return SparseControlNetModel(**MOTION)


def _video(batch: int, rows: int, columns: int) -> Any:
    return noise(batch, 4, FRAMES, rows, columns)


def _text_for_each_frame(batch: int, rows: int, columns: int) -> Any:
    return noise(batch, WORDS, TEXT).repeat_interleave(FRAMES, dim=0)


VIDEO = {
    **SIZE,
    "down_block_types": ("CrossAttnDownBlock3D",) * 2,
    "up_block_types": ("CrossAttnUpBlock3D",) * 2,
    "attention_head_dim": 4,
}


def _unet_3d() -> Any:
    from diffusers import UNet3DConditionModel

    return UNet3DConditionModel(**VIDEO)


def _i2vgen() -> Any:
    from diffusers import I2VGenXLUNet

    return I2VGenXLUNet(**VIDEO)


def _stable_video() -> Any:
    from diffusers import UNetSpatioTemporalConditionModel

    return UNetSpatioTemporalConditionModel(
        **_but(SIZE, "norm_num_groups", "block_out_channels"),
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlockSpatioTemporal",) * 2,
        up_block_types=("CrossAttnUpBlockSpatioTemporal",) * 2,
        in_channels=4,
        num_attention_heads=2,
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=24,
        num_frames=FRAMES,
    )


def _both_levels(
    build: Callable[[], Any], inputs: Callable[[int, int, int], dict[str, Any]] = _inputs, **facts: Any
) -> Family:
    return Family(build, inputs, merge={"max_downsample": 2}, **facts)


FAMILIES: dict[str, Family] = {
    "UNet2DConditionModel": _both_levels(_unet),
    "UNet2DConditionModel, SDXL": _both_levels(_sdxl, _and(added_cond_kwargs=_size_and_text)),
    "UNet2DConditionModel, GLIGEN": _both_levels(
        lambda: _unet(attention_type="gated"), _and(cross_attention_kwargs=_boxes)
    ),
    "UNet2DConditionModel, IP-Adapter": _both_levels(
        _ip_adapter, _and(added_cond_kwargs=lambda batch, *_: {"image_embeds": [noise(batch, 1, 8)]})
    ),
    "UNet2DConditionModel, upscaler": _both_levels(
        lambda: _unet(in_channels=7, num_class_embeds=1000, only_cross_attention=(False, True)),
        _and(
            sample=lambda batch, *size: noise(batch, 7, *size),
            class_labels=lambda batch, *_: torch.full((batch,), 20),
        ),
    ),
    "DreamLiteUNetModel": _both_levels(_dreamlite),
    "ControlNetModel": _both_levels(_controlnet, _and(controlnet_cond=_picture)),
    "ControlNetUnionModel": _both_levels(
        _controlnet_union,
        _and(
            controlnet_cond=lambda *size: [_picture(*size)],
            control_type=lambda batch, *_: torch.tensor([[1.0, 0.0]] * batch),
            control_type_idx=lambda *_: [0],
            conditioning_scale=lambda *_: [1.0],
        ),
        mixes=True,
    ),
    "UNetControlNetXSModel": _both_levels(_controlnet_xs, _and(controlnet_cond=_picture), multiple=2),
    "AudioLDM2UNet2DConditionModel": _both_levels(
        _audioldm2, _and(encoder_hidden_states_1=lambda batch, *_: noise(batch, WORDS + 2, TEXT + 8))
    ),
    "UNetMotionModel": _both_levels(_motion, _and(sample=_video, encoder_hidden_states=_text_for_each_frame)),
    "UNetMotionModel, FreeNoise": _both_levels(
        _free_noise, _and(sample=_video, encoder_hidden_states=_text_for_each_frame), checkpoints=False
    ),
    "SparseControlNetModel": _both_levels(
        _sparsectrl,
        _and(
            sample=_video,
            encoder_hidden_states=_text_for_each_frame,
            controlnet_cond=_video,
            conditioning_mask=lambda batch, *size: torch.ones(batch, 1, FRAMES, *size),
        ),
    ),
    "UNet3DConditionModel": _both_levels(_unet_3d, _and(sample=_video)),
    "I2VGenXLUNet": _both_levels(
        _i2vgen,
        _and(
            sample=_video,
            fps=lambda batch, *_: torch.full((batch,), 16),
            image_latents=_video,
            image_embeddings=lambda batch, *_: noise(batch, TEXT),
        ),
    ),
    "UNetSpatioTemporalConditionModel": _both_levels(
        _stable_video,
        _and(
            sample=lambda batch, *size: noise(batch, FRAMES, 4, *size),
            encoder_hidden_states=lambda batch, *_: noise(batch, 1, TEXT),
            added_time_ids=lambda batch, *_: torch.ones(batch, 3),
        ),
    ),
}
