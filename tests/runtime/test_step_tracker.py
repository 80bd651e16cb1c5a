"""Which denoising step a call of the model is at, read from the schedulers of diffusers."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch

from tokenmerge.runtime.steps.calls import Condition, Given, conditions_in
from tokenmerge.runtime.steps.scheduler import DenoisingStep, Generation, step_of
from tokenmerge.runtime.steps.step_tracker import StepTracker

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
        step = step_of(scheduler, timestep)
        assert step is not None
        assert step.total == len(scheduler.timesteps)
        assert step.generation.first == first
        found.append(step.index)
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
    assert step_of(scheduler, torch.tensor(0.5)) is None
    assert step_of(scheduler, torch.tensor(975.0)) is None
    assert step_of(None, torch.tensor(1.0)) is None


@pytest.mark.parametrize(
    "name", ["DDIMScheduler", "EulerDiscreteScheduler", "FlowMatchEulerDiscreteScheduler"]
)
def test_a_scheduler_that_no_generation_uses_says_nothing(name):
    """That of a pipeline beside the one that runs, with the same model."""
    scheduler = scheduler_of(name, {})
    assert step_of(scheduler, torch.tensor(500.0)) is None
    indices(scheduler, 4)  # and is over
    if hasattr(scheduler, "step_index"):
        assert step_of(scheduler, torch.tensor(500.0)) is None


def step(index: int, total: int, generation: Generation | None = None) -> DenoisingStep:
    return DenoisingStep(index, total, generation=generation or Generation(0))


def begin(tracker: StepTracker, now: DenoisingStep, given: Given | None = None) -> list[int]:
    """Begin a call, and return the calls that the step before it did not make, if it begins a step."""
    stale = tracker.begin_step(now)
    tracker.begin_call(given or Given())
    return stale


def extrapolation(tracker: StepTracker, *given: Any, **more: Any) -> Any:
    """How far a call extrapolates its blocks, which run if it does not."""
    found = tracker.extrapolation("blocks", *given, **more)
    assert tracker.note_runs({"blocks"})
    return found


def test_calls_of_one_step_are_numbered():
    tracker = StepTracker()
    stale = [begin(tracker, step(index, 3)) for index in (0, 0, 1, 2)]
    # As the third step begins, number 1 is stale: the second has not made it.
    assert stale == [[], [], [], [1]]
    assert tracker.call == 0
    assert tracker.is_last
    begin(tracker, step(2, 3))
    assert tracker.call == 2


def given(text: torch.Tensor, *, shape: tuple[int, ...] = (1,), waits: bool = False) -> Given:
    return Given(shape, conditions_in({"encoder_hidden_states": text}), waits=waits)


def numbers(*steps: list[Given]) -> list[list[int]]:
    """The numbers of the calls of some steps."""
    tracker, found = StepTracker(), []
    for index, calls in enumerate(steps):
        found.append([])
        for one in calls:
            begin(tracker, step(index, len(steps)), one)
            found[-1].append(tracker.call)
    return found


def test_a_call_is_known_by_its_text_whichever_comes_first():
    """Guidance in an interval, and another order. The text is one tensor, a view of one, or made anew."""
    both = torch.randn(2, 4, 8)
    for one, other in [
        (lambda: both[:1], lambda: both[1:]),
        (lambda: both[:1].clone(), lambda: both[1:].clone()),
        (lambda kept=both[:1]: kept, lambda: both[1:].clone()),
    ]:
        a, b = lambda one=one: given(one()), lambda other=other: given(other())
        assert numbers([a()], [b(), a()], [b(), a()], [a(), b()], [a()], [a(), b()]) == [
            *([0], [1, 0], [1, 0], [0, 1], [0]),
            [0, 2],  # what the second had was dropped
        ]


def test_what_was_written_into_the_text_is_another_one():
    text = torch.randn(1, 4, 8)
    first, kept = given(text), given(text.clone())
    text += 1
    assert numbers([kept], [given(text)]) == [[0], [1]]
    # Nothing tells what the first one was: the order has to do.
    assert numbers([first], [given(text)]) == [[0], [0]]


def test_a_device_is_not_asked_again_and_again_for_texts_that_are_made_anew(monkeypatch):
    asked = []
    monkeypatch.setattr(Condition, "equals", lambda self, other: asked.append(1) or True)
    calls = [[given(torch.zeros(1, 4, 8), waits=True)] for _ in range(9)]
    assert numbers(*calls) == [[0]] * 9
    assert len(asked) == 4


def at(timesteps: torch.Tensor, index: int) -> DenoisingStep:
    """The step of a scheduler with these timesteps, as DDIM has them: it does not count."""
    scheduler = SimpleNamespace(timesteps=timesteps, num_inference_steps=len(timesteps))
    found = step_of(scheduler, timesteps[index])
    assert found is not None
    assert found.index == index
    return found


def test_a_generation_is_that_of_the_very_tensor_of_its_timesteps():
    one, same_values = torch.arange(900, 0, -100), torch.arange(900, 0, -100)
    steps = [at(one, index) for index in (4, 5, 5, 6)]
    assert len({step.generation for step in steps}) == 1
    assert [step.generation.first for step in steps] == [4] * 4
    assert [step.done for step in steps] == [0, 1, 1, 2]
    # Another scheduler, or the same one after ``set_timesteps``, with equal timesteps.
    other = at(same_values, 7)
    assert other.generation is not steps[-1].generation
    assert other.generation.first == 7
    # Going back begins another generation with the same timesteps.
    again = at(one, 4)
    assert again.generation is not steps[-1].generation
    assert again.generation.first == 4


def test_tiles_have_deep_copies_of_the_schedulers_state():
    """As StableDiffusionPanoramaPipeline makes them: after each step, of each tile its own."""
    timesteps = torch.arange(900, 0, -100)
    tiles, found = [timesteps, timesteps], []
    for index in (2, 3, 4):
        for tile in range(2):
            found.append(at(tiles[tile], index))
            tiles[tile] = copy.deepcopy(tiles[tile])
    assert len({step.generation for step in found}) == 1


def test_what_is_cached_lives_as_long_as_the_timesteps():
    scheduler = diffusers.DDIMScheduler()
    scheduler.set_timesteps(9)
    generation = weakref.ref(step_of(scheduler, scheduler.timesteps[3]).generation)
    gc.collect()
    assert generation() is not None
    scheduler.set_timesteps(9)
    gc.collect()
    assert generation() is None


def test_plans_last_for_so_many_steps_and_one_shape():
    tracker, small, large = StepTracker(), torch.Size([2]), torch.Size([3])
    due = []
    for index in range(6):
        begin(tracker, step(index, 6))
        due.append(tracker.plans(3, large if index == 5 else small))
    assert due == [True, False, False, True, False, True]


def test_how_far_steps_without_blocks_go_on():
    tracker, shape = StepTracker(), (2, 4)
    found = []
    for index in range(8):
        begin(tracker, step(index, 8))
        found.append(extrapolation(tracker, index in (0, 1, 4, 7), shape))
    assert found == [None, None, 1.0, 2.0, None, 1 / 3, 2 / 3, None]
    # Guidance is over, and with it half of the batch.
    begin(tracker, step(8, 12))
    assert extrapolation(tracker, False, (1, 4)) is None
    begin(tracker, step(9, 12))
    assert extrapolation(tracker, False, (1, 4), holds=False) is None
    begin(tracker, step(10, 12))
    assert extrapolation(tracker, False, (1, 4)) == 1.0


def test_after_a_single_run_a_part_stays_as_it_was():
    tracker, shape, found = StepTracker(), (2, 4), []
    for index in range(5):
        begin(tracker, step(index, 5))
        found.append(extrapolation(tracker, index in (0, 3), shape))
    assert found == [None, 0.0, 0.0, None, 1 / 3]
