"""Schedulers of one's own, whose config is a mapping, an object with attributes, or nothing at all."""

from __future__ import annotations

from collections import OrderedDict
from types import MappingProxyType, SimpleNamespace
from typing import Any

import hosts
import pytest
import torch
from torch import Tensor

from tokenmerge import apply_token_merging
from tokenmerge.runtime.patching.patch import state_of
from tokenmerge.runtime.steps.scheduler import is_flow, setting_of

FIELDS = {"num_train_timesteps": 1000, "prediction_type": "v_prediction"}
CONFIGS = {
    "a dict": FIELDS,
    "another mapping": MappingProxyType(FIELDS),
    "an ordered one": OrderedDict(FIELDS),
    "a namespace": SimpleNamespace(**FIELDS),
    "None": None,
    "a number": 3,
}


class Solver:
    """A scheduler that is none of diffusers."""

    num_inference_steps: int | None = None

    def __init__(self, config: Any) -> None:
        self.config, self.timesteps = config, torch.arange(1000)
        self.alphas_cumprod = torch.linspace(0.999, 0.01, 1000)

    def set_timesteps(self, steps: int) -> None:
        self.num_inference_steps = steps
        self.timesteps = torch.linspace(999, 999 / steps, steps).round().long()


class Pipeline:
    def __init__(self, config: Any) -> None:
        self.scheduler, self.unet = Solver(config), hosts.unet()

    def __call__(self) -> Tensor:
        self.scheduler.set_timesteps(8)
        latents = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            for t in self.scheduler.timesteps:
                made = self.unet(latents, t, torch.zeros(1, 4, 16), return_dict=False)[0]
                latents = latents - 0.1 * made
        return latents


@pytest.mark.parametrize("name", CONFIGS)
def test_the_default_method_works(name):
    pipe = Pipeline(CONFIGS[name])
    patch = apply_token_merging(pipe, speedup=1.5, min_psnr=20)
    latents = pipe()
    assert torch.isfinite(latents).all()
    assert patch.estimate.psnr > 0
    levels = state_of(pipe.unet).last_run.levels
    assert levels.predicts == ("epsilon" if name in ("None", "a number") else "v_prediction")
    assert "by operations" in str(patch)


@pytest.mark.parametrize("name", CONFIGS)
def test_settings_are_read(name):
    solver, known = Solver(CONFIGS[name]), name not in ("None", "a number")
    assert setting_of(solver, "num_train_timesteps", 5) == (1000 if known else 5)
    assert setting_of(solver, "use_flow_sigmas") is None
    assert not is_flow(solver)
    assert is_flow(SimpleNamespace(config={"use_flow_sigmas": True}))
    assert is_flow(SimpleNamespace(config=SimpleNamespace(use_flow_sigmas=True)))
    assert setting_of(None, "num_train_timesteps") is None
