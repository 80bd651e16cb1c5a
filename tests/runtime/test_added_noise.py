"""How much noise each step of a scheduler adds, learned from a copy of it as a generation begins."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    TCDScheduler,
)
from tests.runtime.test_steps_in_pipelines import draw

from tokenmerge import StepReuse, ToMeConfig, apply_token_merging
from tokenmerge.runtime.patching.patch import state_of
from tokenmerge.runtime.steps.added_noise import noise_before
from tokenmerge.runtime.steps.calls import detail_of, noise_in_detail
from tokenmerge.runtime.steps.scheduler import DenoisingStep, Generation, schedule_of

# The arithmetic of some schedulers of diffusers.
pytestmark = pytest.mark.filterwarnings("ignore:__array_(_ implementation|wrap__):DeprecationWarning")

STEPS = 8


def noise_of(scheduler: Any, first: int = 0) -> list[float | None]:
    """The noise that is found for each step of a generation, whose first step may be a later one."""
    generation = Generation(first, schedule_of(scheduler))
    timestep = scheduler.timesteps[first]
    return [
        noise_before(DenoisingStep(index, STEPS, generation), scheduler, timestep)
        for index in range(first, STEPS)
    ]


def test_it_is_what_the_formula_says():
    scheduler = EulerAncestralDiscreteScheduler()
    scheduler.set_timesteps(STEPS)
    sigmas = scheduler.sigmas[: STEPS + 1]
    before, after = sigmas[:-2], sigmas[1:-1]
    added = after * (before**2 - after**2).sqrt() / before
    expected = added / (after**2 + 1).sqrt()  # as the model's sample is scaled
    first, *others = noise_of(scheduler)
    assert first is None
    assert torch.tensor(others) == pytest.approx(expected, rel=0.05)
    scheduler.set_begin_index(3)  # as image-to-image does
    assert noise_of(scheduler, 3)[1:] == pytest.approx(expected[3:].tolist(), rel=0.05)


def test_the_scheduler_and_the_random_numbers_stay_as_they_were():
    scheduler = DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++")
    scheduler.set_timesteps(STEPS)
    before, state = copy.deepcopy(scheduler.__dict__), torch.get_rng_state()
    assert None not in noise_of(scheduler)[1:]
    assert scheduler.__dict__.keys() == before.keys()
    assert (scheduler.step_index, scheduler.model_outputs) == (None, before["model_outputs"])
    assert torch.equal(torch.get_rng_state(), state)


def with_timesteps(scheduler: Any) -> Any:
    scheduler.set_timesteps(STEPS)
    return scheduler


def begun(scheduler: Any) -> Any:
    scheduler.set_timesteps(STEPS)
    sample = torch.ones(1, 4, 8, 8)
    for timestep in scheduler.timesteps[:2]:
        scheduler.step(sample, timestep, scheduler.scale_model_input(sample, timestep))
    return scheduler


def on_device(scheduler: Any) -> Any:
    scheduler.set_timesteps(STEPS)
    scheduler.timesteps = scheduler.timesteps.to("meta")
    return scheduler


UNKNOWN = {
    "clipped": lambda: with_timesteps(DDPMScheduler(clip_sample=True)),
    "thresholds": lambda: with_timesteps(DDPMScheduler(clip_sample=False, thresholding=True)),
    "eta": lambda: with_timesteps(TCDScheduler()),
    "on a device": lambda: on_device(DDPMScheduler(clip_sample=False)),
    "begun": lambda: begun(EulerAncestralDiscreteScheduler()),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_where_a_copy_cannot_tell_it_is_unknown(kind):
    assert noise_of(UNKNOWN[kind]()) == [None] * STEPS


def test_schedulers_that_add_none_are_not_asked():
    assert noise_of(with_timesteps(DDIMScheduler())) == [0.0] * STEPS
    step = DenoisingStep(1, STEPS, Generation(0))
    assert noise_before(step, None, 1.0) == 0.0
    # With ``at_step``, the scheduler of the pipeline may be at another step.
    noisy = begun(EulerAncestralDiscreteScheduler())
    assert noise_before(step, noisy, noisy.timesteps[1]) is None


@pytest.mark.parametrize("shape", [(1, 4, 64, 64), (1, 4096, 1), (1, 64, 64)])
def test_noise_in_the_detail_is_that_in_the_sample_and_its_neighbours(shape):
    torch.manual_seed(0)
    sample = 0.7 * torch.randn(shape)
    found = detail_of(sample)
    assert found is not None
    assert float(found.std()) == pytest.approx(noise_in_detail(sample, 0.7), rel=0.05)
    assert noise_in_detail([sample[0]], 0.7) == noise_in_detail(sample, 0.7)


@pytest.mark.filterwarnings("ignore:this generation is dense")
def test_a_generation_draws_the_same_numbers_as_without_it(pipe):
    """Its generator is the user's; the one that a copy of the scheduler gets is another."""
    pipe.scheduler = EulerAncestralDiscreteScheduler.from_config(pipe.scheduler.config)
    expected = draw(pipe, STEPS)
    all_steps = tuple(index / (STEPS - 1) for index in range(STEPS))
    apply_token_merging(pipe, ToMeConfig(ratio=0, reuse=StepReuse(full_steps=all_steps)))
    assert state_of(pipe.unet).follows_steps
    assert torch.equal(draw(pipe, STEPS), expected)
