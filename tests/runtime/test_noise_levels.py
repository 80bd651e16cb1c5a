"""Noise levels of diffusers' schedulers, the predicted image, and how much noise a scheduler adds."""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import hosts
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tokenmerge import apply_token_merging
from tokenmerge.plans.estimate import BEFORE_A_RUN, influence_of, noise_of
from tokenmerge.plans.policy import ESTIMATE
from tokenmerge.runtime.memory.run_log import AddedNoise
from tokenmerge.runtime.steps.noise_levels import NoiseLevels, clips_pictures_alone, noise_levels
from tokenmerge.runtime.steps.scheduler import step_of

# Of NumPy, in diffusers.
pytestmark = pytest.mark.filterwarnings("ignore:__array_(_ implementation|wrap__):DeprecationWarning")

PLAIN = ("DDIM", "EulerDiscrete", "DPMSolverMultistep", "UniPCMultistep", "PNDM", "LMSDiscrete")
NOISY = {"EulerAncestralDiscrete": 2, "DDPM": 2, "LCM": 5}
FLOW = ("FlowMatchEulerDiscrete", "FlowMatchHeunDiscrete")
PREDICTS = ("epsilon", "v_prediction", "sample")


class Run:
    """A generation with a model that knows the image.

    Attributes:
        levels: its noise levels.
        images: that :class:`NoiseLevels` reads from the calls of the model.
        noise: that the scheduler adds.
    """

    def __init__(self, name: str, predicts: str | None = None, steps: int = 12, **config: Any) -> None:
        cls = getattr(diffusers, f"{name}Scheduler")
        known = inspect.signature(cls.__init__).parameters
        given = {"prediction_type": predicts, "clip_sample": False, "skip_prk_steps": True, **config}
        scheduler = cls(**{key: value for key, value in given.items() if key in known and value is not None})
        scheduler.set_timesteps(steps)
        step = step_of(scheduler, scheduler.timesteps[0])
        assert step is not None
        levels = noise_levels(scheduler, step)
        assert levels is not None
        self.levels, self.pictures, added = levels, [], AddedNoise()
        generator = torch.Generator().manual_seed(0)
        self.picture = torch.randn(1, 4, 32, 32, generator=generator)
        latents = torch.randn(1, 4, 32, 32, generator=generator) * getattr(scheduler, "init_noise_sigma", 1.0)
        accepts = inspect.signature(scheduler.step).parameters
        more = {"generator": generator} if "generator" in accepts else {}
        for index, t in enumerate(scheduler.timesteps):
            sample = latents
            if hasattr(scheduler, "scale_model_input"):
                sample = scheduler.scale_model_input(latents, t)
            output = exact(levels, sample, self.picture, index)
            found = levels.picture(sample, output, index)
            self.pictures.append(found)
            if index < len(scheduler.timesteps) - 1:
                added.note(levels, sample, found, index)
            latents = scheduler.step(output, t, latents, **more, return_dict=False)[0]
        self.latents = latents
        assert added.kept is not None
        self.noise = noise_of(float(added.kept), *added.levels)


def exact(levels: NoiseLevels, sample: Tensor, picture: Tensor, index: int) -> Tensor:
    """Return the output of a model that knows the image."""
    sigma = levels.sigmas[index]
    if levels.predicts == "flow":
        share = sigma / (1 + sigma)
        return (sample - (1 - share) * picture) / share - picture
    of_picture = 1 / (1 + sigma**2) ** 0.5
    noise = (sample - of_picture * picture) / (sigma * of_picture)
    return {
        "epsilon": noise,
        "v_prediction": of_picture * noise - sigma * of_picture * picture,
        "sample": picture,
    }[levels.predicts]


@pytest.mark.parametrize("name", [*PLAIN, *NOISY])
@pytest.mark.parametrize("predicts", PREDICTS)
def test_the_predicted_picture_is_read_from_the_output(name, predicts):
    if name in ("LMSDiscrete", "PNDM", "EulerAncestralDiscrete") and predicts == "sample":
        pytest.skip("diffusers does not have it")
    run = Run(name, predicts)
    for found in run.pictures:
        assert_close(found, run.picture, atol=1e-2, rtol=1e-2)
    # The scheduler agrees with these levels: it ends at the image.
    assert_close(run.latents, run.picture, atol=0.15, rtol=0.0)


@pytest.mark.parametrize("name", FLOW)
def test_of_flow_matching_too(name):
    run = Run(name, steps=8)
    assert run.levels.predicts == "flow"
    for found in run.pictures:
        assert_close(found, run.picture, atol=1e-2, rtol=1e-2)
    assert_close(run.latents, run.picture, atol=1e-2, rtol=0.0)


@pytest.mark.parametrize("name", [*PLAIN, *FLOW])
def test_solvers_that_add_no_noise_are_told(name):
    assert Run(name, "epsilon").noise == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("name", NOISY)
def test_solvers_that_add_noise_are_told(name):
    noise = Run(name, "epsilon").noise
    assert noise > 4 if name == "LCM" else noise == pytest.approx(NOISY[name], abs=0.2)


def test_so_is_the_noise_of_a_solver_that_may_add_it():
    run = Run("DPMSolverMultistep", "epsilon", algorithm_type="sde-dpmsolver++")
    assert run.noise == pytest.approx(2, abs=0.2)


def test_the_picture_itself_is_not_taken_for_noise():
    levels = NoiseLevels((3.0, 2.0, 1.0, 0.0), "flow")
    picture, noise = torch.randn(2, 1, 4096)
    added = AddedNoise()
    for index, kept in ((1, 2.0), (2, 0.5)):
        sample = (picture + kept * noise) / (1 + levels.sigmas[index])
        added.note(levels, sample, picture, index)
    assert added.kept is not None
    assert float(added.kept) == pytest.approx(0.25)
    assert added.levels == (2.0, 1.0)


def test_an_output_counts_by_the_noise():
    levels = NoiseLevels((4.0, 1.0, 0.0), "epsilon")
    assert [levels.weight(index) for index in range(2)] == [4.0, 1.0]
    for predicts in (*PREDICTS, "flow"):
        levels = NoiseLevels((4.0, 1.0, 0.0), predicts)
        sample, error = torch.randn(1, 4), torch.randn(1, 4)
        changed = levels.picture(sample, error, 0) - levels.picture(sample, torch.zeros(1, 4), 0)
        assert_close(changed.abs(), error.abs() * levels.weight(0))


def test_timesteps_of_another_generation_tell_nothing():
    schedulers = [diffusers.DDIMScheduler(), diffusers.DDIMScheduler()]
    for scheduler in schedulers:
        scheduler.set_timesteps(4)
    step = step_of(schedulers[0], schedulers[0].timesteps[0])
    assert step is not None
    assert noise_levels(schedulers[0], step) is not None
    assert noise_levels(schedulers[1], step) is None
    assert noise_levels(None, step) is None


CLIPPING = [
    (name, setting)
    for name in dir(diffusers)
    if name.endswith("Scheduler") and inspect.isclass(getattr(diffusers, name))
    for setting in ("clip_sample", "thresholding")
    if setting in inspect.signature(getattr(diffusers, name).__init__).parameters
]
KEEPS_NOISE = ("DDIMScheduler", "DDIMParallelScheduler", "DDIMInverseScheduler")


@pytest.mark.parametrize(("name", "setting"), CLIPPING)
@pytest.mark.parametrize("predicts", ["epsilon", "v_prediction"])
def test_solvers_that_clip_the_picture_and_not_the_noise_are_told(name, setting, predicts):
    cls = getattr(diffusers, name)
    known = inspect.signature(cls.__init__).parameters
    given = {"clip_sample": False, "thresholding": False, "prediction_type": predicts}
    plain = {key: value for key, value in given.items() if key in known}
    try:
        schedulers = [cls(**plain), cls(**{**plain, setting: True})]
    except NotImplementedError:
        pytest.skip("diffusers does not have it")
    assert [clips_pictures_alone(one) for one in schedulers] == [False, name in KEEPS_NOISE]


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("predicts", ["epsilon", "v_prediction"])
def test_where_the_picture_is_clipped_the_error_of_the_noise_stays(predicts, clips):
    """The share of an error that a step of DDIM leaves is that of the estimate."""
    scheduler = diffusers.DDIMScheduler(clip_sample=clips, prediction_type=predicts)
    scheduler.set_timesteps(8)
    step = step_of(scheduler, scheduler.timesteps[0])
    assert step is not None
    levels = noise_levels(scheduler, step)
    assert levels is not None
    assert levels.clips is clips
    index, sample = 4, torch.full((1, 1), 3.0, dtype=torch.float64)
    t, later = scheduler.timesteps[index : index + 2]
    root = scheduler.alphas_cumprod[later].sqrt()
    outputs = [torch.full_like(sample, output) for output in (-2.0, -1.99)]
    pictures = [levels.picture(sample, output, index) for output in outputs]
    assert min(abs(float(picture)) for picture in pictures) > 1  # they are clipped
    latents = [scheduler.step(output, t, sample).prev_sample / root for output in outputs]
    left = abs(float((latents[1] - latents[0]) / (pictures[1] - pictures[0])))
    before, after = levels.sigmas[index : index + 2]
    assert left == pytest.approx(influence_of([before, after], clips=clips)[0], rel=1e-3)


def test_the_estimate_of_a_solver_that_clips_is_lower_and_wider():
    found = []
    for clips in (False, True):
        pipe = Clipped()
        pipe.scheduler = diffusers.DDIMScheduler(clip_sample=clips)
        patch = apply_token_merging(pipe, speedup=1.5)
        pipe()
        found.append(patch.estimate)
    plain, clipped = found
    assert clipped.psnr < plain.psnr - 3
    assert (plain.within, clipped.within) == (ESTIMATE["within"], BEFORE_A_RUN)
    expects_more = f"{clipped.psnr - BEFORE_A_RUN:.0f} to {clipped.psnr + BEFORE_A_RUN:.0f}"
    assert expects_more in str(clipped)


class Clipped:
    """A pipeline of a tiny UNet without guidance."""

    do_classifier_free_guidance = False
    scheduler: Any

    def __init__(self) -> None:
        self.scheduler, self.unet = diffusers.DDIMScheduler(), hosts.unet()

    def __call__(self) -> None:
        latents = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(0))
        self.scheduler.set_timesteps(12)
        with torch.no_grad():
            for t in self.scheduler.timesteps:
                output = self.unet(latents, t, torch.zeros(1, 4, 16), return_dict=False)[0]
                latents = self.scheduler.step(output, t, latents, return_dict=False)[0]
