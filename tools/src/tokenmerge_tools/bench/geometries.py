"""Published configurations of well-known denoisers."""

from __future__ import annotations

import dataclasses
from typing import Any

# The VAE of Stable Diffusion. The one of SDXL has the same layers.
_CODEC = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "sample_size": 512,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """The architecture of one model.

    ``config`` has the arguments of the denoiser's class in diffusers that differ from their defaults, and
    ``depth`` names those that set the number of layers, which ``@DEPTH`` multiplies. Width and height are in
    pixels, and must be multiples of ``multiple``. ``guided``: classifier-free guidance doubles the batch.
    ``pipeline`` is a text-to-image pipeline that can run on prompt embeddings alone; None: only the denoiser
    can be measured. The scheduler uses the noise schedule of Stable Diffusion. ``codec`` has the arguments of
    the pipeline's ``AutoencoderKL``.
    """

    title: str
    denoiser: str
    config: dict[str, Any]
    size: tuple[int, int]
    multiple: int
    depth: tuple[str, ...]
    guided: bool = True
    pipeline: str | None = None
    scheduler: str = "PNDMScheduler"
    codec: dict[str, Any] = dataclasses.field(default_factory=lambda: dict(_CODEC))


_UNET_DEPTH = ("layers_per_block", "transformer_layers_per_block")

GEOMETRIES = {
    "sd15": Geometry(
        title="Stable Diffusion 1.5",
        denoiser="UNet2DConditionModel",
        config={"sample_size": 64, "cross_attention_dim": 768, "layers_per_block": 2},
        size=(512, 512),
        multiple=8,
        depth=_UNET_DEPTH,
        pipeline="StableDiffusionPipeline",
    ),
    "sd21": Geometry(
        title="Stable Diffusion 2.1",
        denoiser="UNet2DConditionModel",
        config={
            "sample_size": 96,
            "cross_attention_dim": 1024,
            "attention_head_dim": (5, 10, 20, 20),
            "use_linear_projection": True,
            "layers_per_block": 2,
        },
        size=(768, 768),
        multiple=8,
        depth=_UNET_DEPTH,
        pipeline="StableDiffusionPipeline",
    ),
    "sdxl": Geometry(
        title="Stable Diffusion XL 1.0",
        denoiser="UNet2DConditionModel",
        config={
            "sample_size": 128,
            "block_out_channels": (320, 640, 1280),
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            "layers_per_block": 2,
            "transformer_layers_per_block": (1, 2, 10),
            "attention_head_dim": (5, 10, 20),
            "cross_attention_dim": 2048,
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
        size=(1024, 1024),
        multiple=8,
        depth=_UNET_DEPTH,
        pipeline="StableDiffusionXLPipeline",
        scheduler="EulerDiscreteScheduler",
    ),
    "sd3": Geometry(
        title="Stable Diffusion 3 medium",
        denoiser="SD3Transformer2DModel",
        config={
            "sample_size": 128,
            "num_layers": 24,
            "num_attention_heads": 24,
            "caption_projection_dim": 1536,
            "pos_embed_max_size": 192,
        },
        size=(1024, 1024),
        multiple=16,
        depth=("num_layers",),
    ),
    "flux": Geometry(
        title="FLUX.1 dev",
        denoiser="FluxTransformer2DModel",
        config={"guidance_embeds": True, "num_layers": 19, "num_single_layers": 38},
        size=(1024, 1024),
        multiple=16,
        depth=("num_layers", "num_single_layers"),
        guided=False,
    ),
    "wan": Geometry(
        title="Wan 2.1 text-to-video 1.3B",
        denoiser="WanTransformer3DModel",
        config={"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
        size=(832, 480),
        multiple=16,
        depth=("num_layers",),
    ),
}
