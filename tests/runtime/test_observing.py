"""What observes a generation never makes it fail or changes it; an error there costs a figure alone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import hosts
import pytest
import torch
from diffusers import DDIMScheduler
from tests.models.test_every_family import call, model_of
from tests.models.tiny import FAMILIES, distinct
from torch import Tensor
from torch.testing import assert_close

from tokenmerge import StepReuse, ToMeConfig, apply_token_merging
from tokenmerge.models.find import find_hosts
from tokenmerge.plans.generation import StepKind
from tokenmerge.runtime.memory import run_log
from tokenmerge.runtime.patching import begin_generation, run_notes
from tokenmerge.runtime.patching.patch import state_of

# Of NumPy, in diffusers.
pytestmark = pytest.mark.filterwarnings("ignore:__array_(_ implementation|wrap__):DeprecationWarning")

STEPS = 12
Change = Callable[[int, Tensor], Tensor]  # of the latents before a step


class Loop:
    """A pipeline with classifier-free guidance in one batch that does not tell its scale."""

    def __init__(self) -> None:
        self.scheduler = DDIMScheduler(prediction_type="v_prediction", clip_sample=False)
        self.unet = hosts.unet()

    def __call__(
        self, pictures: int = 1, change: Change = lambda step, latents: latents, first: int = 0
    ) -> Tensor:
        """Draw so many images, each with a seed of its own, from ``first`` on."""
        dtype = next(self.unet.parameters()).dtype

        def noise(*shape: int) -> Tensor:
            seeds = range(first, first + pictures)
            each = [
                torch.randn(1, *shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
                for seed in seeds
            ]
            return torch.cat(each)

        latents, text = noise(4, 16, 16), torch.cat([torch.zeros(pictures, 4, 16, dtype=dtype), noise(4, 16)])
        self.scheduler.set_timesteps(STEPS)
        with torch.no_grad():
            for step, t in enumerate(self.scheduler.timesteps):
                latents = change(step, latents)
                both = self.unet(torch.cat([latents] * 2), t, text, return_dict=False)[0]
                without, with_text = both.chunk(2)
                output = without + 3 * (with_text - without)
                latents = self.scheduler.step(output, t, latents, return_dict=False)[0]
        return latents


class Guided(Loop):
    """One that does tell it."""

    do_classifier_free_guidance, guidance_scale = True, 3.0


def fails(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("a figure")


OBSERVERS = [
    (run_notes, "noise_levels"),
    (run_notes, "_note_facts"),
    (run_notes, "_note_step"),
    (run_log.RunLog, "note_forecast"),
    (run_log.RunLog, "note_output"),
    (run_log.RunLog, "note_end"),
    (run_log.StepLog, "begin_call"),
    (run_log.StepLog, "note_plan"),
    (run_log.StepLog, "end_call"),
    (run_log.AddedNoise, "note"),
]


@pytest.mark.parametrize(("owner", "name"), OBSERVERS, ids=[name for _, name in OBSERVERS])
def test_an_error_of_an_observer_costs_a_figure_and_not_the_picture(
    monkeypatch, errors_of_observers_survive, owner, name
):
    pipe = Guided()
    # It merges, skips steps and is recorded, so that everything is noted.
    config = ToMeConfig(ratio=0.5, reuse=StepReuse(every=3, shallow_every=2))
    patch = apply_token_merging(pipe, config)
    patch.record_steps()
    expected = pipe()
    patch = apply_token_merging(pipe, config)
    patch.record_steps()
    monkeypatch.setattr(owner, name, fails)
    reason = "observing the generation failed: ZeroDivisionError: a figure"
    with pytest.warns(UserWarning, match=f"^no estimate: {reason}; the image is as without it$") as warned:
        first, second = pipe(), pipe()
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)
    assert len(warned) == 1
    assert patch.estimate is None
    assert f"\n  no estimate: {reason}\n" in str(patch)
    assert patch.report().rows
    log = state_of(pipe.unet).last_run
    assert not log.outputs
    assert log.sample is None


def test_so_does_an_error_of_reading_the_estimate(monkeypatch, errors_of_observers_survive):
    pipe = Guided()
    patch = apply_token_merging(pipe, speedup=1.5)
    pipe()
    monkeypatch.setattr("tokenmerge.default_method.estimate_closeness", fails)
    assert patch.estimate is None
    assert "\n  no estimate: observing the generation failed: ZeroDivisionError: a figure\n" in str(patch)
    assert patch.report().estimated.startswith("no estimate: observing")


def test_in_tests_such_an_error_raises(monkeypatch):
    """Otherwise mistakes of observers would pass unseen."""
    monkeypatch.setattr(run_log.RunLog, "note_output", fails)
    pipe = Guided()
    apply_token_merging(pipe, ToMeConfig(ratio=0, reuse=StepReuse(every=2)))
    with pytest.raises(ZeroDivisionError):
        pipe()


def test_a_tolerance_runs_dense_where_it_cannot_observe(monkeypatch, errors_of_observers_survive):
    pipe = Guided()
    apply_token_merging(pipe, speedup=1.5)
    pipe()
    planned = state_of(pipe.unet).last_run.kinds[StepKind.SHALLOW]
    apply_token_merging(pipe, speedup=1.5, min_psnr=1)
    pipe()
    assert state_of(pipe.unet).last_run.kinds[StepKind.SHALLOW] == planned
    monkeypatch.setattr(begin_generation, "observations_of", fails)
    with pytest.warns(UserWarning, match="no estimate: observing the generation failed"):
        pipe()
    run = state_of(pipe.unet).last_run
    first = run.config.reuse.steps_of(STEPS).full
    assert run.kinds[StepKind.SHALLOW] == 0
    assert first == tuple(range(STEPS))


@pytest.mark.parametrize("kind", [Loop, Guided])
@pytest.mark.parametrize("pictures", [1, 2, 3])
def test_a_batch_of_any_size_has_an_estimate(kind, pictures):
    pipe = kind()
    patch = apply_token_merging(pipe, speedup=1.5, min_psnr=20)
    pipe(pictures)
    assert math.isfinite(patch.estimate.psnr)
    entries = pictures if kind is Guided else 2 * pictures
    assert {len(one.error) for one in state_of(pipe.unet).last_run.errors} == {entries}


@pytest.mark.parametrize("guided", [False, True])
def test_the_errors_of_a_picture_in_a_batch_are_those_that_it_has_alone(guided):
    """Up to rounding, which differs with the size of a batch."""
    pipe = (Guided if guided else Loop)()
    apply_token_merging(pipe, ToMeConfig(ratio=0, reuse=StepReuse(every=3, shallow_every=2)))
    found = []
    for pictures, first in ((2, 0), (1, 0), (1, 1)):
        pipe(pictures, first=first)
        errors = state_of(pipe.unet).last_run.errors
        found.append(torch.stack([one.error for one in errors]))
    both, *alone = found
    assert_close(both, torch.stack(alone, dim=-1).flatten(1), rtol=1e-3, atol=0.0)


class Pipeline:
    """One whose attributes are set by a test."""

    transformer: Any
    scheduler: Any
    guidance_scale: Any
    do_classifier_free_guidance: bool


# Blocks of these get frames or places in their batch, which :func:`distinct` does not look at.
FOLDED = (
    "UNetMotionModel",
    "UNetMotionModel, FreeNoise",
    "UNet3DConditionModel",
    "I2VGenXLUNet",
    "UNetSpatioTemporalConditionModel",
    "LatteTransformer3DModel",
)
SKIPPING = [
    name
    for name in dict.fromkeys((*distinct(), *FOLDED))
    if find_hosts(FAMILIES[name].build())[0].can_skip and not find_hosts(FAMILIES[name].build())[0].controlnet
]
GUIDANCE = {"none": 1.0, "known": 3.0, "unknown": None, "tensor": torch.tensor([[1.0], [3.0]])}


@pytest.mark.parametrize(
    ("guidance", "pictures"), [("none", 1), ("none", 3), ("known", 2), ("unknown", 2), ("tensor", 2)]
)
@pytest.mark.parametrize("name", SKIPPING)
def test_errors_are_those_of_pictures_in_every_family(name, guidance, pictures):
    """Also where a block gets frames or places in its batch."""
    family = FAMILIES[name]
    model = model_of(family)
    host, guided = find_hosts(model)[0], guidance != "none"
    pipe = Pipeline()
    pipe.transformer, pipe.scheduler, pipe.guidance_scale = model, DDIMScheduler(), GUIDANCE[guidance]
    if guidance != "unknown":  # a pipeline without the attribute
        pipe.do_classifier_free_guidance = guided
    patch = apply_token_merging(pipe, ToMeConfig(ratio=0, reuse=StepReuse(every=2)))
    with torch.no_grad():
        for step in range(6):
            patch.at_step(step, 6)
            inputs = family.inputs(pictures * (1 + guided), *family.fitting((8, 8)))
            sample = inputs[host.sample]
            is_compared = isinstance(sample, Tensor) and sample.is_floating_point()
            if is_compared:
                sample = sample * (1 + 0.1 * step**2)
                sample = torch.cat([sample[:pictures]] * 2) if guided else sample
            inputs[host.sample] = sample
            call(model, inputs)
    errors = state_of(model).last_run.errors
    assert bool(errors) == is_compared  # and no list of samples, and no token ids
    for one in errors:
        assert len(one.error) == pictures * (1 + (guidance in ("unknown", "tensor")))
        assert (one.error > 0).all()


@pytest.mark.parametrize("kind", [Loop, Guided])
@pytest.mark.parametrize("how", [{"speedup": 1.5}, {"speedup": 1.5, "min_psnr": 30}])
def test_in_double_precision_there_is_an_estimate(kind, how):
    found = []
    for dtype in (torch.float32, torch.float64):
        pipe = kind()
        pipe.unet.to(dtype)
        patch = apply_token_merging(pipe, **how)
        pipe(2)
        found.append(patch.estimate.psnr)
    assert math.isfinite(found[0])


def spoilt(pipe: Loop, step: int, value: float) -> Tensor:
    """Return two images, of which one gets a wrong number before a step."""

    def change(now: int, latents: Tensor) -> Tensor:
        if now == step:
            latents = latents.clone()
            latents[1, 0, 0, 0] = value
        return latents

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pipe(2, change)


@pytest.mark.parametrize("step", [0, 6, STEPS - 1])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("kind", [Loop, Guided])
def test_of_latents_that_are_not_finite_there_is_no_estimate(kind, step, value):
    pipe = kind()
    patch = apply_token_merging(pipe, speedup=1.5)
    spoilt(pipe, step, value)
    if math.isfinite(value):
        assert patch.estimate is None or math.isfinite(patch.estimate.psnr)
    else:
        assert patch.estimate is None
    pipe(2)
    assert math.isfinite(patch.estimate.psnr)


def test_the_handle_says_so(errors_of_observers_survive):
    pipe = Guided()
    patch = apply_token_merging(pipe, speedup=1.5, min_psnr=20)
    spoilt(pipe, 5, math.nan)
    reason = "no estimate: the latents had numbers that are infinite, or no numbers (NaN)"
    assert f"\n  {reason}\n" in str(patch)
    assert patch.report().estimated.startswith(reason)


@pytest.mark.filterwarnings("ignore:min_psnr=100")
@pytest.mark.parametrize("stopped", [1, 5, STEPS - 1])
@pytest.mark.parametrize("how", [{"speedup": 1.5}, {"speedup": 1.5, "min_psnr": 100}])
def test_an_interrupted_generation_has_no_estimate(stopped, how):
    pipe = Guided()
    patch = apply_token_merging(pipe, **how)

    def interrupted(now: int, latents: Tensor) -> Tensor:
        if now == stopped:
            raise KeyboardInterrupt
        return latents

    with pytest.raises(KeyboardInterrupt):
        pipe(1, interrupted)
    assert patch.estimate is None
    assert f"\n  no estimate: only {stopped} of {STEPS} steps have run\n" in str(patch)


def test_neither_has_one_that_was_interrupted_in_its_last_call():
    pipe = Guided()
    patch = apply_token_merging(pipe, speedup=1.5)
    last = pipe.unet.conv_out
    calls = 0

    def stop(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == STEPS:
            raise KeyboardInterrupt

    hook = last.register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        pipe()
    hook.remove()
    assert patch.estimate is None
    pipe()
    assert patch.estimate is not None
