"""What the runtime notes of the errors of its forecasts, in steps that know the truth."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import hosts
import pytest
import torch
from diffusers import EulerDiscreteScheduler
from tests.models.test_every_family import call, model_of
from tests.models.tiny import FAMILIES
from torch import Tensor
from torch.testing import assert_close

from tokenmerge import Correction, StepReuse, ToMeConfig, apply_token_merging
from tokenmerge.runtime.memory.run_log import ForecastError
from tokenmerge.runtime.patching.patch import state_of

# Of NumPy, in diffusers.
pytestmark = pytest.mark.filterwarnings("ignore:__array_(_ implementation|wrap__):DeprecationWarning")

STEPS = 12
REUSE = ToMeConfig(ratio=0, reuse=StepReuse(every=3, shallow_every=2))
COMPLETE, FINEST = (0, 1, 5, 7, 11), (0, 1, 3, 5, 7, 9, 11)


def noted(patch: Any, model: Any, inputs: Any) -> list[ForecastError]:
    """The errors of a generation with these inputs in each step."""
    for index in range(STEPS):
        patch.at_step(index, STEPS)
        call(model, inputs(index))
    return state_of(model).last_run.errors


def test_each_step_that_runs_a_part_compares_it_with_its_forecast():
    unet = hosts.unet()
    patch = apply_token_merging(unet, REUSE)
    assert REUSE.reuse.steps_of(STEPS).full == COMPLETE
    errors = noted(patch, unet, lambda index: hosts.inputs_at(index, batch=2))
    deep = [(one.step, one.gap) for one in errors if one.part == "deep"]
    finest = [(one.step, one.gap) for one in errors if one.part == "finest"]
    # The forecast needs two runs.
    assert deep == [(5, 4), (7, 2), (11, 4)]
    assert finest == [(step, step - before) for before, step in pairwise(FINEST[1:])]
    assert all(one.error.shape == (2,) and (one.error > 0).all() for one in errors)


def test_where_nothing_changes_forecasts_are_right():
    unet = hosts.unet()
    errors = noted(apply_token_merging(unet, REUSE), unet, lambda index: hosts.inputs(2))
    assert errors
    assert all((one.error < 1e-5).all() for one in errors)


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "SD3Transformer2DModel"])
def test_blocks_of_a_transformer_are_compared_too(name):
    family = FAMILIES[name]
    model = model_of(family)
    patch = apply_token_merging(model, ToMeConfig(ratio=0, reuse=StepReuse(every=3)))
    inputs = family.inputs(1, 8, 8)
    drift = {name: torch.randn_like(value) for name, value in inputs.items() if name == "hidden_states"}
    assert drift

    def drifting(index: int) -> dict[str, Any]:
        return {**inputs, "hidden_states": inputs["hidden_states"] + 0.1 * index**2 * drift["hidden_states"]}

    errors = noted(patch, model, drifting)
    assert {one.part for one in errors} == {"deep"}
    assert [one.step for one in errors] == list(StepReuse(every=3).steps_of(STEPS).full[2:])
    assert all((one.error > 0).all() for one in errors)


def test_the_error_is_what_the_output_would_have_missed():
    """After two runs it is not known how the change turns, so that the forecast misses all of it."""
    unet = hosts.unet()
    patch = apply_token_merging(unet, ToMeConfig(ratio=0, reuse=StepReuse(full_steps=(0, 0.25, 0.75, 1))))
    outputs = {}
    for index in range(5):
        patch.at_step(index, 5)
        outputs[index] = call(unet, hosts.inputs_at(index))
    # The noise levels of such a loop are unknown, so that the output itself counts.
    missed = (outputs[3] - outputs[1]).square().mean().sqrt()
    found = [one for one in state_of(unet).last_run.errors if one.step == 3]
    assert [one.part for one in found] == ["deep", "finest"]
    for one in found:
        assert_close(one.error, missed.view(1))


class Guided:
    """A pipeline whose model gets each sample twice."""

    do_classifier_free_guidance, guidance_scale = True, 5.0

    def __init__(self) -> None:
        self.scheduler, self.unet = EulerDiscreteScheduler(), hosts.unet()

    def __call__(self) -> list[Tensor]:
        """Return the output of each step that guidance makes."""
        self.scheduler.set_timesteps(5)
        latents = torch.randn(1, 4, 16, 16) * self.scheduler.init_noise_sigma
        text, made = torch.randn(2, 4, 16), []
        with torch.no_grad():
            for t in self.scheduler.timesteps:
                sample = self.scheduler.scale_model_input(latents, t)
                without, with_text = self.unet(torch.cat([sample] * 2), t, text, return_dict=False)[0].chunk(
                    2
                )
                output = without + 5 * (with_text - without)
                made.append(output)
                latents = self.scheduler.step(output, t, latents, return_dict=False)[0]
        return made


def test_an_error_is_that_of_the_predicted_picture():
    pipe = Guided()
    apply_token_merging(pipe, ToMeConfig(ratio=0, reuse=StepReuse(full_steps=(0, 0.25, 0.75, 1))))
    made = pipe()
    sigma = float(pipe.scheduler.sigmas[3])
    missed = sigma * (made[3] - made[1]).square().mean().sqrt()
    log = state_of(pipe.unet).last_run
    found = [one.error for one in log.errors if one.step == 3]
    assert len(found) == 2
    for error in found:
        assert_close(error, missed.view(1))
    assert not log.outputs
    assert log.sample is None


def test_a_dense_generation_compares_nothing(monkeypatch):
    def unwanted(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("tokenmerge.runtime.memory.run_log._guided", unwanted)
    pipe = Guided()
    apply_token_merging(pipe, ToMeConfig(ratio=0.5, correction=Correction(every=2)))
    pipe()
    assert not state_of(pipe.unet).last_run.errors
