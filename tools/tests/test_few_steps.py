"""Generations of 1, 2 and 4 steps, with the schedulers of distilled models: they merge, or say why not."""

import diffusers
import numpy as np
import pytest
import torch

from tokenmerge import ToMeConfig, apply_token_merging, token_merging
from tokenmerge_tools.pipelines.loading import find_model, load_pipeline

# DPMSolverMultistepScheduler of diffusers 0.42 passes a tensor to numpy in a way that numpy 2 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

# As the model cards of LCM, TCD, Lightning and Schnell configure them.
SCHEDULERS = {
    "LCMScheduler": ("emoji-unet", {}),
    "TCDScheduler": ("emoji-unet", {}),
    "EulerDiscreteScheduler": ("emoji-unet", {"timestep_spacing": "trailing"}),
    "FlowMatchEulerDiscreteScheduler": ("emoji-mmdit", {"shift": 1.0}),
}
MERGING = ToMeConfig(ratio=0.5, planner="tiled", max_downsample=8)


@pytest.fixture(scope="module")
def pipes():
    found = {}
    for name in ("emoji-unet", "emoji-mmdit"):
        found[name] = load_pipeline(find_model(name), torch.float32, torch.device("cpu"))
        found[name].set_progress_bar_config(disable=True)
    return found


def draw(pipe, steps):
    arguments = {"num_inference_steps": steps, "height": 64, "width": 64, "output_type": "np"}
    generator = torch.Generator().manual_seed(1)
    return pipe("a red apple", guidance_scale=1.0, generator=generator, **arguments).images


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_short_generations_merge_under_the_schedulers_of_distilled_models(pipes, name, steps, monkeypatch):
    model, changes = SCHEDULERS[name]
    pipe = pipes[model]
    scheduler = getattr(diffusers, name).from_config(pipe.scheduler.config, **changes)
    monkeypatch.setattr(pipe, "scheduler", scheduler)
    dense = draw(pipe, steps)
    with token_merging(pipe, ToMeConfig(ratio=0)):
        assert np.array_equal(draw(pipe, steps), dense)
    with token_merging(pipe, MERGING):
        merged = draw(pipe, steps)
        assert np.array_equal(draw(pipe, steps), merged)
    assert np.isfinite(merged).all()
    assert not np.array_equal(merged, dense)
    assert np.array_equal(draw(pipe, steps), dense)


@pytest.mark.usefixtures("large_grids_alone")
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("model", ["emoji-unet", "emoji-mmdit"])
def test_auto_says_that_a_short_generation_of_a_small_picture_is_dense(pipes, model, steps):
    pipe = pipes[model]
    dense = draw(pipe, steps)
    patch = apply_token_merging(pipe, speedup=2.0)
    try:
        words = (
            rf"speedup=2: nothing can be saved in {steps} step{'s' if steps > 1 else ''} on .*larger image"
        )
        with pytest.warns(UserWarning, match=words):
            picture = draw(pipe, steps)
    finally:
        patch.remove()
    assert np.array_equal(picture, dense)
