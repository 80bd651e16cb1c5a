"""The same weights in diffusers' UNet and in ComfyUI's: `emoji-unet`, which comes with the package."""

from __future__ import annotations

import comfy_hosts as hosts
import pytest
import torch
from diffusers import UNet2DConditionModel

import tokenmerge
from tokenmerge import ToMeConfig
from tokenmerge.integrations.comfyui.models import find_target
from tokenmerge.integrations.comfyui.patch import patched
from tokenmerge.integrations.comfyui.sampling import KEY, Sampling
from tokenmerge.integrations.comfyui.settings import Settings
from tokenmerge_tools import demo


@pytest.fixture(scope="module")
def pair():
    theirs = UNet2DConditionModel.from_pretrained(demo.path("emoji-unet"), subfolder="unet").eval()
    return hosts.emoji_unet(theirs), theirs


@pytest.mark.parametrize(
    "settings",
    [
        {"ratio": 0.0},
        {"ratio": 0.5, "planner": "uniform"},
        {"ratio": 0.5, "planner": "uniform", "combine": "keep", "seed": 3},
        {"ratio": 0.75, "planner": "uniform", "proportional": True, "max_downsample": 4},
        {"ratio": 0.5, "planner": "uniform", "merge_crossattn": True, "max_downsample": 2},
        {"ratio": 0.5, "planner": "uniform", "scope": "keys", "combine": "keep"},
    ],
    ids=str,
)
def test_the_result_is_that_of_the_diffusers_path(pair, settings):
    """Planner "uniform" makes the same plan from any features.

    Other planners compare normalised tokens here, since ComfyUI's patches get only these.
    """
    model, theirs = pair
    settings = Settings(ToMeConfig(**settings), find_target(model))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 32, 32, generator=generator)
    text, times = torch.randn(2, 16, 128, generator=generator), torch.tensor([501.0, 501.0])
    clone, sampling = patched(model, settings), Sampling(settings)
    sampling.begin_step(1.0, times, x.shape, True)
    sampling.begin_call(x.shape, {})
    options = {**clone.model_options["transformer_options"], "wrappers": clone.wrappers, KEY: sampling}
    with torch.inference_mode():
        here = model.model.diffusion_model(x, times, context=text, transformer_options=options)
        if settings.config.ratio:
            patch = tokenmerge.apply_token_merging(theirs, settings.config)
            there = theirs(x, times, text).sample
            patch.remove()
            # Merging changes the result by more than 0.5, and float32 over this network errs by 4e-6.
            assert (here - theirs(x, times, text).sample).abs().max() > 0.1
        else:
            there = theirs(x, times, text).sample
    assert (here - there).abs().max() < 2e-5
