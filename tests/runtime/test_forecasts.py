"""What the runtime notes of the errors of its forecasts, in steps that know the truth."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import hosts
import pytest
import torch
from tests.models.test_every_family import call, model_of
from tests.models.tiny import FAMILIES
from torch.testing import assert_close

from tokenmerge import StepReuse, ToMeConfig, apply_token_merging
from tokenmerge.runtime.memory.run_log import ForecastError
from tokenmerge.runtime.patching.patch import state_of

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
    errors = noted(patch, unet, lambda index: hosts.inputs(2, seed=index))
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


def test_the_error_is_that_of_the_extrapolated_output():
    """After two runs it is not known how the change turns, so that the forecast is the latest output."""
    unet = hosts.unet()
    patch = apply_token_merging(unet, ToMeConfig(ratio=0, reuse=StepReuse(full_steps=(0, 0.25, 0.75, 1))))
    stage = unet.get_submodule("up_blocks.0")
    outputs = []
    stage.register_forward_hook(lambda _, args, result: outputs.append((index, result)))
    for index in range(5):
        patch.at_step(index, 5)
        call(unet, hosts.inputs(1, seed=index))
    known = dict(outputs)
    wanted = (known[1] - known[3]).norm() / known[3].norm()
    (error,) = (one.error for one in state_of(unet).last_run.errors if (one.step, one.part) == (3, "deep"))
    assert_close(error, wanted.view(1))
