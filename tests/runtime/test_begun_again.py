"""A loop of one's own that is broken off in its first step, and begins again with the same timesteps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import hosts
import pytest
import torch
from diffusers import DDIMScheduler
from torch import Tensor

from tokenmerge import Correction, MergeSharing, StepReuse, ToMeConfig, apply_token_merging

STEPS = 6
SETTINGS = {
    "plans of several steps": ToMeConfig(ratio=0.5, merge_sharing=MergeSharing(every=3)),
    "corrections": ToMeConfig(ratio=0.5, correction=Correction(every=3)),
    "step reuse": ToMeConfig(ratio=0.0, reuse=StepReuse(every=2)),
}


class Pipeline(SimpleNamespace):
    """Models and a scheduler. A plain namespace could not be referred to weakly."""


def loop(unet: Any, scheduler: DDIMScheduler, text: Tensor, seed: int, until: int = STEPS) -> Tensor:
    """Denoise; DDIM does not count its steps."""
    generator = torch.Generator().manual_seed(seed)
    sample = torch.randn(1, 4, 16, 16, generator=generator)
    with torch.no_grad():
        for timestep in scheduler.timesteps[:until]:
            output = unet(sample, timestep, encoder_hidden_states=text).sample
            sample = scheduler.step(output, timestep, sample).prev_sample
    return sample


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("encoded", ["once", "twice"])
def test_it_is_as_if_it_had_never_begun_before(kind, seed, encoded):
    """Its prompt is the tensor of the cancelled one, or one of the same values."""
    text = torch.randn(1, 7, hosts.TEXT)

    def pipeline() -> Pipeline:
        scheduler = DDIMScheduler(clip_sample=False)
        scheduler.set_timesteps(STEPS)
        return Pipeline(unet=hosts.unet(), scheduler=scheduler)

    fresh, again = pipeline(), pipeline()
    for pipe in (fresh, again):
        apply_token_merging(pipe, SETTINGS[kind])
    loop(again.unet, again.scheduler, text, seed=0, until=1)  # cancelled after the call of its first step
    wanted = loop(fresh.unet, fresh.scheduler, text, seed)
    text = text if encoded == "once" else text.clone()
    assert torch.equal(loop(again.unet, again.scheduler, text, seed), wanted)
