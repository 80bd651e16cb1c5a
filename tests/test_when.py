"""Which denoising step a call of the model is at, read from the schedulers of diffusers."""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import pytest
import torch

from tokenmerge.when import Moment, Turns, moment_of

# One of each way to count: with step_index and without, several calls a step, flow matching.
# Its arithmetic is diffusers' own.
pytestmark = pytest.mark.filterwarnings("ignore:__array_(_ implementation|wrap__):DeprecationWarning")

SCHEDULERS = [
    ("DDIMScheduler", {}),
    ("DDPMScheduler", {}),
    ("DPMSolverMultistepScheduler", {}),
    ("EulerDiscreteScheduler", {}),
    ("EulerAncestralDiscreteScheduler", {}),
    ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
    ("HeunDiscreteScheduler", {}),
    ("KDPM2DiscreteScheduler", {}),
    ("LCMScheduler", {}),
    ("LMSDiscreteScheduler", {}),
    ("UniPCMultistepScheduler", {}),
]


def scheduler_of(name: str, settings: dict[str, Any]) -> Any:
    return getattr(diffusers, name)(**settings)


def indices(scheduler: Any, steps: int, first: int = 0, unit: float = 1.0, dtype: Any = None) -> list[int]:
    """What is read at each call of a loop as pipelines have it."""
    scheduler.set_timesteps(steps)
    if first and hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(first)
    sample, found = torch.zeros(1, 4, 8, 8), []
    for t in scheduler.timesteps[first:]:
        if hasattr(scheduler, "scale_model_input"):
            sample = scheduler.scale_model_input(sample, t)
        timestep = (t / unit).to(dtype or t.dtype).expand(2)
        moment = moment_of(scheduler, timestep)
        assert moment is not None
        assert moment.total == len(scheduler.timesteps)
        assert moment.generation is scheduler.timesteps
        found.append(moment.index)
        extra = (
            {"generator": torch.Generator()}
            if "generator" in inspect.signature(scheduler.step).parameters
            else {}
        )
        sample = scheduler.step(torch.zeros_like(sample), t, sample, **extra).prev_sample
    return found


@pytest.mark.parametrize(("name", "settings"), SCHEDULERS, ids=[name for name, _ in SCHEDULERS])
@pytest.mark.parametrize("first", [0, 3])
def test_every_call_has_its_index(name, settings, first):
    scheduler = scheduler_of(name, settings)
    found = indices(scheduler, 8, first)
    assert found == list(range(first, len(scheduler.timesteps)))


def test_the_timestep_in_another_unit_or_in_half_precision_is_no_matter_to_schedulers_that_count():
    scheduler = scheduler_of("FlowMatchEulerDiscreteScheduler", {"shift": 3.0})
    assert indices(scheduler, 50, unit=1000, dtype=torch.bfloat16) == list(range(50))


def test_half_precision_is_near_enough_for_schedulers_that_do_not_count():
    scheduler = scheduler_of("DDIMScheduler", {})
    assert indices(scheduler, 20, dtype=torch.bfloat16) == list(range(20))


def test_what_cannot_be_told_is_not_guessed():
    scheduler = scheduler_of("DDIMScheduler", {})
    scheduler.set_timesteps(20)
    assert moment_of(scheduler, torch.tensor(0.5)) is None
    assert moment_of(scheduler, torch.tensor(975.0)) is None
    assert moment_of(None, torch.tensor(1.0)) is None


def test_calls_of_one_step_are_numbered_and_generations_begin_anew():
    turns, first, second = Turns(), object(), object()
    begins = [turns.note(Moment(g, i, 3)) for g, i in ((first, 0), (first, 0), (first, 1), (second, 0))]
    assert begins == [True, False, False, True]
    assert turns.number == 0
    turns.note(Moment(second, 0, 3))
    assert turns.number == 1
    # The scheduler's timesteps may be the same: then going back begins a generation.
    turns.note(Moment(second, 2, 3))
    assert turns.is_last
    assert turns.note(Moment(second, 0, 3))


def test_plans_last_for_so_many_steps_and_one_shape():
    turns, small, large = Turns(), torch.Size([2]), torch.Size([3])
    due = []
    for index in range(6):
        turns.note(Moment(None, index, 6))
        due.append(turns.plans(3, large if index == 5 else small))
    assert due == [True, False, False, True, False, True]
