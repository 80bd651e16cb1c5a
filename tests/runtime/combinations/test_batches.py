"""Pipelines of diffusers draw several images in a batch, guided or not, in each way to merge."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import diffusers as D
import pytest
import torch
from tests.models.family import TEXT, seeded
from tests.models.tiny import FAMILIES
from tiny_pipeline import UNET
from torch import Tensor

from tokenmerge import apply_token_merging

STEPS = 6
WAYS: dict[str, dict[str, Any]] = {
    "speedup": {"speedup": 2.0},
    "min_psnr": {"speedup": 2.0, "min_psnr": 30},
    "ratio": {"ratio": 0.5},
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array_(_ implementation|wrap__):DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:min_psnr=30:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*saves next to no time at this size:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*what CrossAttnStoreProcessor at .* looks at:UserWarning"),
]


def text(pictures: int, seed: int, words: int = 7, width: int = TEXT) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(pictures, words, width, generator=generator)


def words(pictures: int) -> dict[str, Any]:
    return {"prompt_embeds": text(pictures, 1), "negative_prompt_embeds": text(pictures, 2)}


def masked(pictures: int) -> dict[str, Any]:
    ones = torch.ones(pictures, 7, dtype=torch.bool)
    masks = {"prompt_attention_mask": ones, "negative_prompt_attention_mask": ones}
    return {**words(pictures), **masks, "negative_prompt": None}


def pooled(pictures: int) -> dict[str, Any]:
    both = {
        "pooled_prompt_embeds": text(pictures, 3)[:, 0],
        "negative_pooled_prompt_embeds": text(pictures, 4)[:, 0],
    }
    return {**words(pictures), **both}


def picture(pictures: int, side: int = 64) -> Tensor:
    return torch.rand(pictures, 3, side, side, generator=torch.Generator().manual_seed(5))


def codec(levels: int = 4) -> Any:
    return D.AutoencoderKL(
        block_out_channels=(8,) * levels,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        norm_num_groups=4,
        latent_channels=4,
        scaling_factor=0.08333,
        shift_factor=0.1,
    ).eval()


def ddim() -> Any:
    return D.DDIMScheduler(clip_sample=False, steps_offset=1)


def flow() -> Any:
    return D.FlowMatchEulerDiscreteScheduler()


def wan_solver() -> Any:
    return D.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)


def unet(**changes: Any) -> Any:
    return seeded(D.UNet2DConditionModel(**{**UNET, "cross_attention_dim": TEXT, **changes}))


def family(name: str) -> Callable[[], Any]:
    return lambda: seeded(FAMILIES[name].build())


UNGUIDED = {"guidance_scale": 1.0}
NOTHING: dict[str, Any] = {}


class Case(NamedTuple):
    """A pipeline, and what it is called with for a number of images."""

    pipeline: str
    denoiser: Callable[[], Any]
    scheduler: Callable[[], Any]
    given: Callable[[int], dict[str, Any]]
    off: dict[str, Any] | None = UNGUIDED  # turns guidance off; None: no argument does
    parts: dict[str, Callable[[], Any]] = NOTHING
    on: dict[str, Any] = NOTHING  # turns guidance on, where a pipeline does not guide by itself
    version: str = ""  # of the model, where a pipeline has several

    def build(self) -> Any:
        torch.manual_seed(0)
        kind = getattr(D, self.pipeline)
        takes = inspect.signature(kind.__init__).parameters
        parts: dict[str, Any] = {
            name: None
            for name, parameter in takes.items()
            if name != "self" and parameter.default is inspect.Parameter.empty
        }
        parts |= {name: make() for name, make in self.parts.items()}
        own = "unet" if "unet" in takes else "transformer"
        parts |= {own: self.denoiser(), "scheduler": self.scheduler()}
        if "requires_safety_checker" in takes:
            parts["requires_safety_checker"] = False
        made = kind(**parts)
        made.set_progress_bar_config(disable=True)
        return made

    def draw(self, pipe: Any, pictures: int, guides: bool, **more: Any) -> Tensor:
        given = {**self.given(pictures), **(self.on if guides else self.off or NOTHING), **more}
        given = {"output_type": "latent", "num_inference_steps": STEPS, **given}
        torch.manual_seed(0)  # some pipelines draw the latents of a control image from it
        made = pipe(**given, generator=torch.Generator().manual_seed(0))
        return torch.as_tensor(made[0])


def sized(
    given: Callable[[int], dict[str, Any]], side: int = 128, **more: Any
) -> Callable[[int], dict[str, Any]]:
    return lambda pictures: {**given(pictures), "height": side, "width": side, **more}


def motion() -> Any:
    return seeded(FAMILIES["UNetMotionModel"].build())


def clip() -> Any:
    """An encoder of images, of which Stable Video Diffusion makes its text."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPVisionConfig(**size, image_size=128, patch_size=64, projection_dim=TEXT)
    return CLIPVisionModelWithProjection(config).eval()


def clip_pictures() -> Any:
    from transformers import CLIPImageProcessorPil

    return CLIPImageProcessorPil(size={"shortest_edge": 128}, crop_size={"height": 128, "width": 128})


def video_codec() -> Any:
    return D.AutoencoderKLTemporalDecoder(
        block_out_channels=(32,) * 4, down_block_types=("DownEncoderBlock2D",) * 4, latent_channels=4
    ).eval()


def classes(pictures: int) -> dict[str, Any]:
    return {"class_labels": list(range(3, 3 + pictures)), "output_type": "np"}


def changed(name: str, **changes: Any) -> Callable[[], Any]:
    """A model of a family with other settings, as its pipeline needs them."""

    def build() -> Any:
        made = FAMILIES[name].build()
        known = {name: value for name, value in made.config.items() if not name.startswith("_")}
        return seeded(type(made)(**known | changes))

    return build


def latte(pictures: int) -> dict[str, Any]:
    return {**words(pictures), "negative_prompt": None}


def with_masks(pictures: int) -> dict[str, Any]:
    ones = torch.ones(pictures, 7, dtype=torch.long)
    return {**words(pictures), "prompt_embeds_mask": ones, "negative_prompt_embeds_mask": ones}


def texts_of_hunyuan(pictures: int) -> dict[str, Any]:
    given = {**masked(pictures), **pooled(pictures)}
    return {name: value for name, value in given.items() if name != "negative_prompt"}


def two_texts(pictures: int) -> dict[str, Any]:
    second = {f"{name}_2": value for name, value in masked(pictures).items() if name != "negative_prompt"}
    return {**masked(pictures), **second, "use_resolution_binning": False}


def svd() -> Any:
    return seeded(
        D.UNetSpatioTemporalConditionModel(
            sample_size=16,
            in_channels=8,
            block_out_channels=(32, 64),
            down_block_types=("CrossAttnDownBlockSpatioTemporal",) * 2,
            up_block_types=("CrossAttnUpBlockSpatioTemporal",) * 2,
            layers_per_block=1,
            num_attention_heads=(2, 2),
            cross_attention_dim=TEXT,
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=24,
            num_frames=3,
        )
    )


# Settings of the codecs of Wan and Qwen-Image, which have the same parts.
SMALL_CODEC: dict[str, Any] = {
    "z_dim": 4,
    "dim_mult": [1] * 4,
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
    "latents_mean": [0.0] * 4,
    "latents_std": [1.0] * 4,
}


def wan_codec() -> Any:
    return D.AutoencoderKLWan(base_dim=3, **SMALL_CODEC).eval()


def sizes_of_pixart(pictures: int) -> dict[str, Any]:
    return {**masked(pictures), "height": 128, "width": 128, "use_resolution_binning": False}


def upscaled(pictures: int) -> dict[str, Any]:
    return {**words(pictures), "image": picture(pictures, 16)}


def edited(pictures: int) -> dict[str, Any]:
    return {**words(pictures), "image": picture(pictures, 128)}


def animated(pictures: int) -> dict[str, Any]:
    return {"image": picture(pictures, 128), "height": 128, "width": 128, "num_frames": 3}


def controlled(given: Callable[[int], dict[str, Any]], name: str = "image") -> Callable[..., dict[str, Any]]:
    """Arguments with an image for each prompt that a ControlNet follows."""
    return sized(lambda pictures: {**given(pictures), name: picture(pictures, 128)})


def controlnet_of(denoiser: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: seeded(
        D.ControlNetModel.from_unet(denoiser(), conditioning_embedding_out_channels=(8, 8, 8, 8))
    )


def codec_of_flux_2() -> Any:
    """Of images in 4 channels, which the pipelines normalise."""
    levels = 4
    return D.AutoencoderKLFlux2(
        block_out_channels=(8,) * levels,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        norm_num_groups=4,
        latent_channels=4,
    ).eval()


def prompts(pictures: int) -> dict[str, Any]:
    return {"prompt_embeds": text(pictures, 1)}


def lengths(pictures: int) -> Tensor:
    """Where the words of each text begin in all of them, and their number."""
    return torch.arange(pictures + 1) * 7


def kandinsky(pictures: int) -> dict[str, Any]:
    return {
        "prompt_embeds_qwen": text(pictures, 1),
        "prompt_embeds_clip": text(pictures, 3)[:, 0],
        "prompt_cu_seqlens": lengths(pictures),
        "negative_prompt_embeds_qwen": text(pictures, 2),
        "negative_prompt_embeds_clip": text(pictures, 4)[:, 0],
        "negative_prompt_cu_seqlens": lengths(pictures),
    }


def listed(pictures: int) -> dict[str, Any]:
    return {name: list(each) for name, each in words(pictures).items()}


def second_texts(pictures: int, width: int = 12) -> dict[str, Any]:
    second = {
        **with_masks(pictures),
        "prompt_embeds": text(pictures, 3, width=width),
        "negative_prompt_embeds": text(pictures, 4, width=width),
    }
    return {**with_masks(pictures), **{f"{name}_2": value for name, value in second.items()}}


def inpainted(pictures: int) -> dict[str, Any]:
    return {**edited(pictures), "mask_image": torch.ones(pictures, 1, 128, 128), "height": 128, "width": 128}


def codec_of_hunyuan_video() -> Any:
    return D.AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(16,) * 5, layers_per_block=1
    ).eval()


def codec_of_easyanimate() -> Any:
    return D.AutoencoderKLMagvit(
        latent_channels=4,
        block_out_channels=(8,) * 4,
        down_block_types=("SpatialDownBlock3D", *["SpatialTemporalDownBlock3D"] * 3),
        up_block_types=("SpatialUpBlock3D", *["SpatialTemporalUpBlock3D"] * 3),
        layers_per_block=1,
        norm_num_groups=4,
    ).eval()


def codec_of_qwen() -> Any:
    return D.AutoencoderKLQwenImage(base_dim=4, **SMALL_CODEC).eval()


class NoChecker:
    """In place of a package that Cosmos' pipelines ask for: they pass no text and no image to it here."""

    def to(self, device: Any) -> None:
        pass


SD = {"vae": codec}
NO_GUIDANCE = {"min_guidance_scale": 1.0, "max_guidance_scale": 1.0}
CASES = [
    Case("StableDiffusionPipeline", unet, ddim, sized(words), parts=SD),
    Case("StableDiffusionImg2ImgPipeline", unet, ddim, edited, parts=SD),
    Case("StableDiffusionPAGPipeline", unet, ddim, sized(words), parts=SD),
    Case("StableDiffusionInstructPix2PixPipeline", lambda: unet(in_channels=8), ddim, edited, parts=SD),
    Case(
        "StableDiffusionUpscalePipeline",
        lambda: unet(in_channels=7, num_class_embeds=1000),
        ddim,
        upscaled,
        parts={"vae": lambda: codec(3), "low_res_scheduler": D.DDPMScheduler},
    ),
    Case("StableDiffusionXLPipeline", family("UNet2DConditionModel, SDXL"), ddim, sized(pooled), parts=SD),
    Case("StableDiffusion3Pipeline", family("SD3Transformer2DModel"), flow, sized(pooled)),
    Case(
        "FluxPipeline",
        family("FluxTransformer2DModel"),
        flow,
        sized(pooled),
        off={"true_cfg_scale": 1.0},
        on={"true_cfg_scale": 3.0},
    ),
    Case("PixArtAlphaPipeline", family("PixArtTransformer2DModel"), ddim, sizes_of_pixart, parts=SD),
    Case("PixArtSigmaPipeline", family("PixArtTransformer2DModel"), ddim, sizes_of_pixart, parts=SD),
    Case(
        "DiTPipeline",
        changed("DiTTransformer2DModel", sample_size=16, out_channels=8),
        ddim,
        classes,
        parts=SD,
    ),
    Case(
        "LattePipeline",
        changed("LatteTransformer3DModel", out_channels=8),
        ddim,
        sized(latte, video_length=3),
        parts=SD,
    ),
    Case(
        "StableVideoDiffusionPipeline",
        svd,
        D.EulerDiscreteScheduler,
        animated,
        NO_GUIDANCE,
        parts={"vae": video_codec, "image_encoder": clip, "feature_extractor": clip_pictures},
    ),
    Case("AnimateDiffPipeline", motion, ddim, sized(words, num_frames=3), parts=SD),
    Case("TextToVideoSDPipeline", family("UNet3DConditionModel"), ddim, sized(words, num_frames=3), parts=SD),
    Case(
        "WanPipeline",
        family("WanTransformer3DModel"),
        wan_solver,
        sized(words, num_frames=9),
        parts={"vae": wan_codec},
    ),
    Case("AuraFlowPipeline", family("AuraFlowTransformer2DModel"), flow, sized(masked), parts=SD),
    Case(
        "SanaPipeline",
        changed("SanaTransformer2DModel", guidance_embeds=False),
        flow,
        sized(masked, use_resolution_binning=False),
    ),
    Case("Lumina2Pipeline", family("Lumina2Transformer2DModel"), flow, sized(masked)),
    Case("MochiPipeline", family("MochiTransformer3DModel"), flow, sized(masked, num_frames=13)),
    Case("LTXPipeline", family("LTXVideoTransformer3DModel"), flow, sized(masked, 256, num_frames=17)),
    Case("AllegroPipeline", family("AllegroTransformer3DModel"), ddim, sized(masked, num_frames=12)),
    Case(
        "QwenImagePipeline",
        changed("QwenImageTransformer2DModel", out_channels=1),
        flow,
        sized(with_masks),
        off={"true_cfg_scale": 1.0},
        on={"true_cfg_scale": 4.0},
    ),
    Case(
        "HunyuanVideoPipeline",
        family("HunyuanVideoTransformer3DModel"),
        flow,
        sized(texts_of_hunyuan, num_frames=9),
        off={"true_cfg_scale": 1.0},
        on={"true_cfg_scale": 4.0},
    ),
    Case("HunyuanDiTPipeline", family("HunyuanDiT2DModel"), ddim, sized(two_texts), parts=SD),
    Case(
        "StableDiffusionPanoramaPipeline",
        unet,
        ddim,
        lambda pictures: {**words(pictures), "height": 128, "width": 640},
        parts=SD,
    ),
    Case(
        "StableDiffusionControlNetPipeline",
        unet,
        ddim,
        controlled(words),
        parts={**SD, "controlnet": controlnet_of(unet)},
    ),
    Case(
        "StableDiffusionXLControlNetPipeline",
        family("UNet2DConditionModel, SDXL"),
        ddim,
        controlled(pooled),
        parts={**SD, "controlnet": controlnet_of(family("UNet2DConditionModel, SDXL"))},
    ),
    Case(
        "StableDiffusion3ControlNetPipeline",
        family("SD3Transformer2DModel"),
        flow,
        controlled(pooled, "control_image"),
        parts={**SD, "controlnet": changed("SD3ControlNetModel", num_layers=3)},
    ),
    Case(
        "FluxControlNetPipeline",
        changed("FluxTransformer2DModel", in_channels=16),
        flow,
        controlled(pooled, "control_image"),
        off={"true_cfg_scale": 1.0},
        on={"true_cfg_scale": 3.0},
        parts={**SD, "controlnet": changed("FluxControlNetModel", in_channels=16)},
    ),
    Case(
        "CogVideoXPipeline",
        changed("CogVideoXTransformer3DModel", attention_head_dim=16),  # as its table of positions needs it
        D.CogVideoXDDIMScheduler,
        sized(words, num_frames=9),
    ),
    Case(
        "CogVideoXPipeline",
        changed("CogVideoXTransformer3DModel 1.5", attention_head_dim=16),
        D.CogVideoXDPMScheduler,
        sized(words, num_frames=9),
        version="1.5",
    ),
    Case(
        "Flux2Pipeline",
        changed("Flux2Transformer2DModel", in_channels=16, out_channels=16, guidance_embeds=True),
        flow,
        sized(prompts),
        on={"guidance_scale": 4.0},
        parts={"vae": codec_of_flux_2},
    ),
    Case(
        "Flux2KleinPipeline",
        changed("Flux2Transformer2DModel", in_channels=16, out_channels=16, guidance_embeds=False),
        flow,
        sized(words),
        on={"guidance_scale": 4.0},
        parts={"vae": codec_of_flux_2},
    ),
    Case(
        "BriaPipeline",
        changed("BriaTransformer2DModel", in_channels=16),
        flow,
        sized(words),
        parts=SD,
    ),
    Case(
        "Kandinsky5T2VPipeline", family("Kandinsky5Transformer3DModel"), flow, sized(kandinsky, num_frames=9)
    ),
    Case("Kandinsky5T2IPipeline", family("Kandinsky5Transformer3DModel"), flow, sized(kandinsky)),
    Case(
        "CosmosTextToWorldPipeline",
        changed("CosmosTransformer3DModel", in_channels=4),
        D.EDMEulerScheduler,
        sized(words, num_frames=17),
        parts={"safety_checker": NoChecker},
    ),
    Case(
        "Cosmos2TextToImagePipeline",
        changed("CosmosTransformer3DModel", in_channels=4),
        lambda: D.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True),
        sized(words),
        parts={"safety_checker": NoChecker},
    ),
    Case(
        "ZImagePipeline",
        family("ZImageTransformer2DModel"),
        flow,
        sized(listed),
        off={"guidance_scale": 0.0},
        on={"guidance_scale": 4.0},
    ),
    Case(
        "OvisImagePipeline", family("OvisImageTransformer2DModel"), flow, sized(words, negative_prompt=None)
    ),
    Case(
        "HunyuanImagePipeline", family("HunyuanImageTransformer2DModel"), flow, sized(second_texts, 256), None
    ),
    Case(
        "HunyuanVideo15Pipeline",
        changed("HunyuanVideo15Transformer3DModel", in_channels=9),
        flow,
        sized(second_texts, num_frames=9),
        off=None,
        parts={"vae": codec_of_hunyuan_video, "guider": D.ClassifierFreeGuidance},
    ),
    Case(
        "EasyAnimatePipeline",
        family("EasyAnimateTransformer3DModel"),
        flow,
        sized(masked, num_frames=9),
        parts={"vae": codec_of_easyanimate},
    ),
    Case(
        "SkyReelsV2Pipeline",
        changed("SkyReelsV2Transformer3DModel", inject_sample_info=False),
        wan_solver,
        sized(words, num_frames=9),
        parts={"vae": wan_codec},
    ),
    Case(
        "StableDiffusionXLPAGPipeline",
        family("UNet2DConditionModel, SDXL"),
        ddim,
        sized(pooled),
        parts=SD,
    ),
    Case("StableDiffusion3PAGPipeline", family("SD3Transformer2DModel"), flow, sized(pooled)),
    Case(
        "SanaPAGPipeline",
        changed("SanaTransformer2DModel", guidance_embeds=False),
        flow,
        sized(masked, use_resolution_binning=False),
    ),
    Case("StableDiffusionSAGPipeline", unet, ddim, sized(words), parts=SD),
    Case("StableDiffusionInpaintPipeline", lambda: unet(in_channels=9), ddim, inpainted, parts=SD),
    Case(
        "LatentConsistencyModelPipeline",
        lambda: unet(time_cond_proj_dim=8),
        D.LCMScheduler,
        sized(prompts),
        parts=SD,
    ),
    Case(
        "HunyuanDiTControlNetPipeline",
        changed("HunyuanDiT2DModel", num_layers=8),
        ddim,
        controlled(two_texts, "control_image"),
        parts={**SD, "controlnet": changed("HunyuanDiT2DControlNetModel", transformer_num_layers=8)},
    ),
    Case(
        "QwenImageControlNetPipeline",
        changed("QwenImageTransformer2DModel", in_channels=16, out_channels=4),
        flow,
        controlled(with_masks, "control_image"),
        off={"true_cfg_scale": 1.0},
        on={"true_cfg_scale": 4.0},
        parts={
            "vae": codec_of_qwen,
            "controlnet": changed(
                "QwenImageControlNetModel", in_channels=16, out_channels=4, extra_condition_channels=0
            ),
        },
    ),
    Case(
        "FluxImg2ImgPipeline",
        changed("FluxTransformer2DModel", in_channels=16),
        flow,
        controlled(pooled),
        off={"true_cfg_scale": 1.0},
        on={"true_cfg_scale": 3.0},
        parts=SD,
    ),
    Case(
        "FluxKontextPipeline",
        changed("FluxTransformer2DModel", in_channels=16),
        flow,
        lambda pictures: {**controlled(pooled)(pictures), "_auto_resize": False, "max_area": 128 * 128},
        off={"true_cfg_scale": 1.0},
        on={"true_cfg_scale": 3.0},
        parts=SD,
    ),
    Case("ChromaPipeline", family("ChromaTransformer2DModel"), flow, sized(masked)),
    Case("CogView4Pipeline", family("CogView4Transformer2DModel"), flow, sized(words)),
    Case(
        "CogView3PlusPipeline",
        family("CogView3PlusTransformer2DModel"),
        D.CogVideoXDDIMScheduler,
        sized(words),
    ),
]


# The slow ones draw one image or three, or without guidance, take over 3 s, or run a model of another one.
SLOW = (
    *("AnimateDiffPipeline", "TextToVideoSDPipeline", "StableVideoDiffusionPipeline"),
    *("StableDiffusionPanoramaPipeline", "Kandinsky5T2IPipeline", "HunyuanVideo15Pipeline"),
    *("HunyuanDiTControlNetPipeline", "FluxImg2ImgPipeline", "FluxKontextPipeline"),
    *("StableDiffusionXLPAGPipeline", "StableDiffusion3PAGPipeline", "SanaPAGPipeline"),
    *("StableDiffusionSAGPipeline", "StableDiffusionInpaintPipeline", "LatentConsistencyModelPipeline"),
)
ALL = [
    pytest.param(
        case,
        pictures,
        guides,
        id=f"{case.pipeline}{case.version}-{pictures}-{'guided' if guides else 'unguided'}",
        marks=[pytest.mark.slow] if case.pipeline in SLOW or (pictures, guides) != (2, True) else [],
    )
    for case in CASES
    for pictures in (1, 2, 3)
    for guides in (True, False)
    if guides or case.off is not None
]


def ways_of(case: Case, pictures: int, guides: bool) -> list[str]:
    """Return the ways to merge that a test draws in: all for two guided images, and one of them for the
    others.

    It is another one for each number of images, and for the next pipeline. So each pipeline is drawn in each
    way and with each number of images, and some pipeline with each of both together.
    """
    if (pictures, guides) == (2, True):
        return [*WAYS]
    others = [(1, True), (3, False), (2, False), (3, True), (1, False)]
    return [[*WAYS][(CASES.index(case) + others.index((pictures, guides))) % len(WAYS)]]


def test_each_number_of_images_is_drawn_in_each_way_by_some_pipeline():
    drawn = {
        (pictures, guides, way)
        for case in CASES
        for pictures in (1, 2, 3)
        for guides in (True, False)
        for way in ways_of(case, pictures, guides)
    }
    assert len(drawn) == 3 * 2 * len(WAYS)


@pytest.mark.parametrize(("case", "pictures", "guides"), ALL)
def test_several_pictures_run_in_a_batch(case: Case, pictures: int, guides: bool) -> None:
    pipe = case.build()
    runs_in_each_way(pipe, lambda: case.draw(pipe, pictures, guides), ways_of(case, pictures, guides))


def runs_in_each_way(pipe: Any, draw: Callable[[], Tensor], ways: Iterable[str] = WAYS) -> None:
    """Draw in each of these ways, and print the handle; without merging, the image is as before."""
    dense = draw()
    for way in ways:
        patch = apply_token_merging(pipe, **WAYS[way])
        made = draw()
        assert made.shape == dense.shape, way
        assert torch.isfinite(made).all(), way
        shown = str(patch)
        assert "not shown" not in shown
        assert "not counted" not in shown
        assert "closeness to dense: " in shown or "no estimate: " in shown, shown
        patch.remove()
    assert torch.equal(draw(), dense)


@pytest.mark.slow
@pytest.mark.parametrize("pictures", [1, 2, 3])
def test_several_pictures_are_edited_by_their_meaning(pipe: Any, pictures: int) -> None:
    """Its batch holds a part for each edit, too."""
    parts = dict(pipe.components)
    del parts["image_encoder"]
    semantic = D.SemanticStableDiffusionPipeline(**parts, requires_safety_checker=False)
    semantic.set_progress_bar_config(disable=True)

    def draw() -> Tensor:
        edit = {"editing_prompt": ["a dog"], "edit_warmup_steps": 1, "edit_threshold": 0.9}
        size = {"height": 64, "width": 64, "num_inference_steps": STEPS, "output_type": "latent"}
        return semantic(
            ["a cat"] * pictures, **size, **edit, generator=torch.Generator().manual_seed(0)
        ).images

    runs_in_each_way(semantic, draw)
