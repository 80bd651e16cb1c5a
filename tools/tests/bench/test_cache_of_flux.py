"""What the default method caches in FLUX.1, whose corrections take one residual for all blocks."""

from __future__ import annotations

import dataclasses

import diffusers
import pytest
import torch

from tokenmerge.models.find import find_hosts
from tokenmerge.plans import RunFacts, correction_bytes, facts_of, plan_for
from tokenmerge.report import predict
from tokenmerge_tools.bench.loaded_model import GEOMETRIES

SPEEDUPS = (1.3, 1.6, 2.0, 2.5, 3.0)
LATENTS = 128  # of 1024 × 1024 pixels


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    geometry = GEOMETRIES["flux"]
    with torch.device("meta"):
        return getattr(diffusers, geometry.denoiser)(**geometry.config).to(torch.bfloat16).eval()


@pytest.fixture(scope="module")
def facts(model: torch.nn.Module) -> RunFacts:
    (host,) = find_hosts(model)
    grid = host.grid_at(LATENTS, LATENTS)
    return facts_of(host, grid, 28, guidance=3.5, number_bytes=host.usual_batch * torch.bfloat16.itemsize)


def test_its_corrections_take_less_than_30_mb(facts: RunFacts) -> None:
    assert correction_bytes(facts, "layers", 0.5) > 1.4e9
    assert 25e6 < correction_bytes(facts, "block", 0.5) < 30e6
    for steps in (28, 8, 4):
        for wanted in SPEEDUPS:
            config = plan_for(dataclasses.replace(facts, steps=steps), wanted).config
            assert config.scope == "block" or not config.merges


@pytest.mark.slow
def test_it_caches_less_than_300_mb(model: torch.nn.Module, facts: RunFacts) -> None:
    for wanted in (2.0, 3.0):
        config = plan_for(facts, wanted).config
        assert 0 < predict(model, config, LATENTS, LATENTS, batch=1, steps=28).kept_bytes < 300e6
