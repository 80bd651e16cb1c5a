"""Diffusion forcing takes more steps than its scheduler has: later frames are denoised with a delay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKLWan,
    SkyReelsV2DiffusionForcingImageToVideoPipeline,
    SkyReelsV2DiffusionForcingPipeline,
    SkyReelsV2DiffusionForcingVideoToVideoPipeline,
    UniPCMultistepScheduler,
)
from tests.models.tiny import FAMILIES, noise, seeded
from torch import Tensor

from tokenmerge import ToMeConfig, apply_token_merging
from tokenmerge.plans.generation import StepKind

STEPS, FRAMES = 8, 13  # frames of video; 4 latent frames
SIDE = 64  # pixels
NAME = "SkyReelsV2Transformer3DModel, times of frames"
WAYS: dict[str, dict[str, Any]] = {
    "speedup": {"speedup": 2.0},
    "min_psnr": {"speedup": 2.0, "min_psnr": 30},
    "ratio": {"ratio": 0.5},
}
LONG = {"base_num_frames": 13, "overlap_history": 5, "num_frames": 21}


def pipeline(kind: type = SkyReelsV2DiffusionForcingPipeline) -> Any:
    torch.manual_seed(0)
    vae = AutoencoderKLWan(
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
        base_dim=3,
        z_dim=4,
        dim_mult=[1] * 4,
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    model = seeded(FAMILIES[NAME].build())
    made = kind(tokenizer=None, text_encoder=None, transformer=model, vae=vae.eval(), scheduler=scheduler)
    made.set_progress_bar_config(disable=True)
    return made


def steps_of(pipe: Any, **arguments: Any) -> int:
    """Draw a video with guidance, and return the steps that ran: each calls the model twice."""
    calls: list[int] = []
    hook = pipe.transformer.register_forward_hook(lambda *_: calls.append(1))
    made = video_of(pipe, **arguments)
    hook.remove()
    assert torch.isfinite(made).all()
    return len(calls) // 2


def video_of(pipe: Any, **arguments: Any) -> Tensor:
    """Draw a video with guidance, and return its latents."""
    words = {"prompt_embeds": noise(1, 7, 16), "negative_prompt_embeds": -noise(1, 7, 16)}
    size = {"height": SIDE, "width": SIDE, "num_frames": FRAMES, "num_inference_steps": STEPS}
    given = {
        "prompt": None,
        **words,
        **size,
        "generator": torch.Generator().manual_seed(0),
        "output_type": "latent",
    }
    made: Tensor = pipe(**given | arguments).frames
    return made


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("delay", [0, 2, 4])
def test_the_handle_says_how_many_steps_ran(way, delay):
    pipe = pipeline()
    patch = apply_token_merging(pipe, **way)
    ran = steps_of(pipe, ar_step=delay)
    assert ran == STEPS + 3 * delay
    assert patch.report().steps == ran
    assert f" {ran} steps" in str(patch)
    assert "not counted" not in str(patch)
    run = patch._state.last_run
    assert run.kinds.total() == ran
    assert run.ended


def test_each_part_of_a_long_video_is_a_generation():
    pipe = pipeline()
    patch = apply_token_merging(pipe, speedup=2.0)
    steps_of(pipe, ar_step=4, **LONG)
    run = patch._state.last_run
    assert run.kinds.total() == run.steps == pipe.num_timesteps > STEPS
    assert run.ended


def test_settings_without_steps_say_how_many_ran():
    pipe = pipeline()
    patch = apply_token_merging(pipe, ToMeConfig(ratio=0.5))
    assert steps_of(pipe, ar_step=2) == patch._state.last_run.steps == STEPS + 6


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (SkyReelsV2DiffusionForcingImageToVideoPipeline, {"image": torch.zeros(1, 3, SIDE, SIDE)}),
        (SkyReelsV2DiffusionForcingVideoToVideoPipeline, {"video": torch.zeros(1, 5, 3, SIDE, SIDE), **LONG}),
    ],
)
def test_it_does_so_from_a_picture_or_a_video(kind, given):
    pipe = pipeline(kind)
    patch = apply_token_merging(pipe, speedup=2.0)
    steps_of(pipe, ar_step=4, **given)
    run = patch._state.last_run
    assert run.kinds.total() == run.steps == pipe.num_timesteps > STEPS


def test_steps_merge_and_are_skipped_by_their_plan():
    pipe = pipeline()
    dense = steps_of(pipe, ar_step=2)
    patch = apply_token_merging(pipe, speedup=2.0)
    patch.record_steps()
    assert steps_of(pipe, ar_step=2) == dense
    assert [row.step for row in patch.steps.rows] == list(range(dense))
    assert patch._state.last_run.misfits == 0
    assert patch._state.last_run.kinds[StepKind.SKIPPED] > 0
