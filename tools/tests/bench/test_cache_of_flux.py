"""What the default method caches in FLUX.1, whose corrections take one residual for all blocks."""

from __future__ import annotations

import dataclasses

import diffusers
import pytest
import torch

from tokenmerge import Correction, MergeSharing, ToMeConfig
from tokenmerge.models.find import find_hosts
from tokenmerge.plans import RunFacts, facts_of, plan_for
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
    return facts_of(host, grid, 28, guidance=3.5)


def test_the_default_method_merges_its_blocks_in_one_stack(facts: RunFacts) -> None:
    for steps in (28, 8, 4):
        for wanted in SPEEDUPS:
            config = plan_for(dataclasses.replace(facts, steps=steps), wanted).config
            assert config.scope == "block" or not config.merges


@pytest.mark.slow
def test_half_of_the_tokens_merged_once_cache_less_than_30_mb(model: torch.nn.Module) -> None:
    """One residual of 4,096 tokens of 3,072 channels in bfloat16 is 25.2 MB."""
    config = ToMeConfig(
        ratio=0.5,
        scope="block",
        planner="tiled",
        features="model_residual",
        proportional=True,
        merge_sharing=MergeSharing(blocks=True),
        correction=Correction(every=10_000),
    )
    kept = predict(model, config, LATENTS, LATENTS, batch=1, steps=28).kept_bytes
    assert 25e6 < kept < 30e6


@pytest.mark.slow
def test_it_caches_less_than_300_mb(model: torch.nn.Module, facts: RunFacts) -> None:
    for wanted in (2.0, 3.0):
        config = plan_for(facts, wanted).config
        assert 0 < predict(model, config, LATENTS, LATENTS, batch=1, steps=28).kept_bytes < 300e6
