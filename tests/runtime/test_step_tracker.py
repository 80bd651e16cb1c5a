"""Which denoising step a call of the model is at, read from the schedulers of diffusers."""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import pytest
import torch

from tokenmerge.runtime.step_tracker import Moment, Turns, moment_of

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
    ("PNDMScheduler", {"skip_prk_steps": True}),  # with a timestep that comes twice
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


@pytest.mark.parametrize("shift", [3.0, 1.0])  # without a shift, 1 is the last of its timesteps too
def test_the_timestep_in_another_unit_or_in_half_precision_is_no_matter_to_schedulers_that_count(shift):
    scheduler = scheduler_of("FlowMatchEulerDiscreteScheduler", {"shift": shift})
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


@pytest.mark.parametrize(
    "name", ["DDIMScheduler", "EulerDiscreteScheduler", "FlowMatchEulerDiscreteScheduler"]
)
def test_a_scheduler_that_no_generation_uses_says_nothing(name):
    """That of a pipeline beside the one that runs, with the same model."""
    scheduler = scheduler_of(name, {})
    assert moment_of(scheduler, torch.tensor(500.0)) is None
    indices(scheduler, 4)  # and is over
    if hasattr(scheduler, "step_index"):
        assert moment_of(scheduler, torch.tensor(500.0)) is None


def test_calls_of_one_step_are_numbered_and_generations_begin_anew():
    turns, first, second = Turns(), object(), object()
    calls = ((first, 0), (first, 0), (first, 1), (first, 2), (second, 0))
    over = [turns.note(Moment(g, i, 3)) for g, i in calls]
    # As the second step begins, calls from number 2 on are over; as the third does, those from 1 on.
    assert over == [0, None, 2, 1, 0]
    assert turns.number == 0
    turns.note(Moment(second, 0, 3))
    assert turns.number == 1
    # The scheduler's timesteps may be the same: then going back begins a generation.
    turns.note(Moment(second, 2, 3))
    assert turns.is_last
    assert turns.note(Moment(second, 0, 3)) == 0


def firsts(moments: list[Moment]) -> list[int]:
    """Where each moment's generation began, if each follows the one before it."""
    before, found = None, []
    for moment in moments:
        before = moment.after(before)
        found.append(before.first)
    return found


def test_a_generation_is_that_of_its_timesteps():
    one, other = torch.arange(9), torch.arange(8)
    assert firsts([Moment(one, i, 9) for i in (4, 5, 5, 6)]) == [4, 4, 4, 4]
    assert firsts([Moment(one, 5, 9), Moment(one, 4, 9)]) == [5, 4]
    assert firsts([Moment(one, 5, 9), Moment(other, 6, 8)]) == [5, 6]


def test_tiles_have_copies_of_the_schedulers_state():
    """As StableDiffusionPanoramaPipeline makes them: after the first step, of each tile its own."""
    set_once = torch.arange(9)
    tiles = [Moment(set_once if i == 2 else torch.arange(9), i, 9) for i in (2, 2, 3, 3, 4, 4)]
    assert firsts(tiles) == [2] * 6
    # Where a generation fails in its first step, the next one begins there, too.
    moments = [Moment(torch.arange(9), 2, 9).after(None)]
    moments.append(Moment(torch.arange(9), 2, 9).after(moments[0]))
    assert moments[1].generation is not moments[0].generation


def test_image_to_image_after_a_generation_that_was_cut_off_begins_its_own():
    """Their timesteps are alike: its scheduler says where it begins, or steps are missing between them."""
    cut_off = Moment(torch.arange(9), 4, 9)
    assert firsts([cut_off, Moment(torch.arange(9), 5, 9, begins=True)]) == [4, 5]
    assert firsts([cut_off, Moment(torch.arange(9), 7, 9)]) == [4, 7]
    scheduler = diffusers.EulerDiscreteScheduler()
    scheduler.set_timesteps(9)
    assert not moment_of(scheduler, scheduler.timesteps[0]).begins
    scheduler.set_begin_index(5)
    assert moment_of(scheduler, scheduler.timesteps[5]).begins
    scheduler.step(torch.zeros(1), scheduler.timesteps[5], torch.zeros(1))
    assert not moment_of(scheduler, scheduler.timesteps[6]).begins


def test_plans_last_for_so_many_steps_and_one_shape():
    turns, small, large = Turns(), torch.Size([2]), torch.Size([3])
    due = []
    for index in range(6):
        turns.note(Moment(None, index, 6))
        due.append(turns.plans(3, large if index == 5 else small))
    assert due == [True, False, False, True, False, True]


def test_how_far_steps_without_blocks_go_on():
    turns, shape = Turns(), (2, 4)
    found = []
    for index in range(8):
        turns.note(Moment(None, index, 8))
        found.append(turns.ahead("blocks", 3, shape))
    assert found == [None, None, 1.0, 2.0, None, 1 / 3, 2 / 3, None]
    # Guidance is over, and with it half of the batch.
    turns.note(Moment(None, 8, 12))
    assert turns.ahead("blocks", 3, (1, 4)) is None
    turns.note(Moment(None, 9, 12))
    assert turns.ahead("blocks", 3, (1, 4)) is None
    turns.note(Moment(None, 10, 12))
    assert turns.ahead("blocks", 3, (1, 4)) == 1.0
