"""Pipelines whose model keeps keys and values for later calls: calls that fill such a cache always run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import diffusers
import numpy as np
import PIL.Image
import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLWan, FlowMatchEulerDiscreteScheduler
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache
from tests.models.tiny import FAMILIES as TINY
from tests.models.undescribed import INPUTS, build, noise
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from tokenmerge import apply_token_merging
from tokenmerge.report.prediction import Report

STEPS = 8
# What the models of diffusers themselves warn about, on a CPU.
pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class Case(NamedTuple):
    """A pipeline, a generation with it, and what is known of its calls."""

    pipe: Any
    draw: Callable[[], Tensor]
    # By call of the model in a generation, whether it fills the cache.
    fills: list[bool]
    last: int  # calls of the last run of the scheduler, with those that fill the cache for it
    run: str  # what the handle says of that run


def seed() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def picture() -> PIL.Image.Image:
    """A reference image of 64 pixels."""
    return PIL.Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))


def glm_image() -> Case:
    """It edits an image, whose keys are cached before the first step. Guidance calls the model twice."""
    vae = AutoencoderKL(
        block_out_channels=(4,) * 4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        norm_num_groups=2,
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.25,
        max_shift=0.75,
        time_shift_type="linear",
        base_image_seq_len=256,
    )
    pipe = diffusers.GlmImagePipeline(
        tokenizer=None,
        processor=None,
        text_encoder=None,
        vision_language_encoder=None,
        vae=vae.eval(),
        transformer=build("GlmImageTransformer2DModel"),
        scheduler=scheduler,
    )
    pipe.check_inputs = lambda *_, **__: None  # it asks for multiples of 32 pixels
    side = 8 * pipe.vae_scale_factor
    words = noise(1, 6, 32)

    def draw() -> Tensor:
        (latents,) = pipe(
            prompt_embeds=words,
            negative_prompt_embeds=words * 0.5,
            prior_token_ids=torch.arange(16)[None],
            prior_token_image_ids=[torch.arange(16)],
            source_image_grid_thw=[torch.tensor([[1, 4, 4]])],
            image=[picture()],
            height=side,
            width=side,
            num_inference_steps=STEPS,
            guidance_scale=2.0,
            generator=seed(),
            output_type="latent",
            return_dict=False,
        )
        return latents

    fills = [True] + [False] * 2 * STEPS
    return Case(pipe, draw, fills, len(fills), f"{STEPS} steps and 1 call that fills a cache")


def anyflow_far() -> Case:
    """It draws a video in three parts. The keys of each one are cached for the next."""
    vae = AutoencoderKLWan(
        base_dim=3,
        z_dim=4,
        dim_mult=[1] * 4,
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    pipe = diffusers.AnyFlowFARPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=vae.eval(),
        transformer=build("AnyFlowFARTransformer3DModel"),
        scheduler=diffusers.FlowMapEulerDiscreteScheduler(),
    )

    def draw() -> Tensor:
        (latents,) = pipe(
            prompt_embeds=noise(1, 6, 16),
            height=64,
            width=64,
            num_frames=13,
            num_inference_steps=STEPS,
            generator=seed(),
            output_type="latent",
            return_dict=False,
            chunk_partition=[1, 1, 2],
        )
        return latents

    part = [False] * STEPS
    run = f"{STEPS} steps and 1 call that fills a cache"
    return Case(pipe, draw, [*part, True, *part, True, *part], STEPS + 1, run)


def flux_2_klein() -> Case:
    """The first step caches the keys of a reference image."""
    vae = diffusers.AutoencoderKLFlux2(
        block_out_channels=(4, 4),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=1,
        norm_num_groups=2,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    pipe = diffusers.Flux2KleinKVPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae.eval(),
        text_encoder=None,
        tokenizer=None,
        transformer=TINY["Flux2Transformer2DModel"].build(),
    )

    def draw() -> Tensor:
        (latents,) = pipe(
            image=picture(),
            prompt_embeds=noise(1, 6, 16),
            height=32,
            width=32,
            num_inference_steps=STEPS,
            generator=seed(),
            output_type="latent",
            return_dict=False,
        )
        return latents

    fills = [True] + [False] * (STEPS - 1)
    return Case(pipe, draw, fills, STEPS, f"{STEPS} steps, of which 1 fills a cache")


class WanAnimate2Loop:
    """The loop of its modular pipeline: each part of a video caches the keys of the video that it follows."""

    parts = 2

    def __init__(self) -> None:
        self.transformer = build("WanAnimate2Transformer3DModel")
        self.scheduler = FlowMatchEulerDiscreteScheduler()

    def __call__(self) -> Tensor:
        made = []
        cache = WanAnimate2KVCache(2)
        for part in range(self.parts):
            latents = torch.randn(16, 2, 4, 4, generator=seed()) + part
            self.scheduler.set_timesteps(STEPS)
            times = self.scheduler.timesteps
            given = INPUTS["WanAnimate2Transformer3DModel"](1)
            given |= {"kv_cache": cache, "hidden_states": [noise(16, 2, 4, 4) + part]}
            self.transformer(**{**given, "timestep": times[:1]})
            sizes = given.pop("offset_grid_sizes")
            given |= {"kv_cache_mode": "cached", "reference_grid_sizes": sizes}
            given |= {"origin_len": 5, "origin_area": [32, 32]}
            for time in times:
                guided, unguided = (
                    self.transformer(
                        **{
                            **given,
                            "hidden_states": [latents],
                            "timestep": time[None],
                            "is_uncondtion": unguided,
                        }
                    ).sample[0]
                    for unguided in (False, True)
                )
                velocity = unguided + 3 * (guided - unguided)
                (latents,) = self.scheduler.step(velocity[None], time, latents[None], return_dict=False)[0]
            cache.clear()
            made.append(latents)
        return torch.stack(made)


def wan_animate_2() -> Case:
    """Guidance calls the model twice in a step."""
    loop = WanAnimate2Loop()
    part = [True] + [False] * 2 * STEPS
    return Case(loop, loop, part * loop.parts, len(part), f"{STEPS} steps and 1 call that fills a cache")


CASES = {
    "AnyFlowFARTransformer3DModel": anyflow_far,
    "Flux2KleinKVPipeline": flux_2_klein,
    "GlmImageTransformer2DModel": glm_image,
    "WanAnimate2Transformer3DModel": wan_animate_2,
}


def inner_runs(model: nn.Module, draw: Callable[[], Tensor]) -> tuple[Tensor, list[bool]]:
    """The result of a generation and, for each call of the model in it, whether a block ran."""
    blocks = next(child for child in model.children() if isinstance(child, nn.ModuleList))
    inner = next(module for module in blocks[0].modules() if isinstance(module, nn.Linear))
    ran: list[bool] = []

    def note(module: nn.Module, _: object) -> None:
        if module is model:
            ran.append(False)
        if module is inner:
            ran[-1] = True

    hook = register_module_forward_pre_hook(note)
    try:
        return draw(), ran
    finally:
        hook.remove()


def speedup_of(ran: list[bool], report: Report) -> float:
    """The operations of dense calls over those of calls of which some skip, as the report counts a call."""
    skipped = min(report.flops_of_steps)
    return len(ran) * report.flops_dense / sum(report.flops_dense if one else skipped for one in ran)


@pytest.mark.parametrize("name", CASES)
def test_calls_that_fill_a_cache_run_and_others_read_it_in_half_of_the_steps(name):
    case = CASES[name]()
    model = case.pipe.transformer
    dense, ran = inner_runs(model, case.draw)
    assert ran == [True] * len(case.fills)
    patch = apply_token_merging(case.pipe, speedup=2.0)
    latents, ran = inner_runs(model, case.draw)
    again, ran_again = inner_runs(model, case.draw)
    assert len(ran) == len(case.fills)
    assert all(one for one, fills in zip(ran, case.fills, strict=True) if fills)
    assert sum(ran) < 0.6 * len(ran)
    assert torch.isfinite(latents).all()
    assert not torch.equal(latents, dense)
    assert torch.equal(latents, again)
    assert ran == ran_again
    # What the handle tells counts the calls that fill the cache.
    report = patch.report()
    assert f"last run: {case.run}, " in str(patch)
    assert report.steps == len(report.step_signs) == STEPS
    assert report.speedup == pytest.approx(speedup_of(ran[-case.last :], report), rel=1e-3)
    patch.remove()
    assert torch.equal(case.draw(), dense)


def test_a_step_that_fills_a_cache_counts_in_what_a_tolerance_costs():
    """Of the other 7 steps, 3 are full by the speed-up alone, and 4 with the tolerance."""
    case = flux_2_klein()
    patch = apply_token_merging(case.pipe, speedup=2.0, min_psnr=1)
    case.draw()
    assert "This cost speed: 1.60× in place of 2.00×" in str(patch)
    assert "few steps: 5 steps of the unchanged model take as long" in str(patch)
