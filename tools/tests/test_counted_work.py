"""The speed-up that a plan computes is the one that the report counts, on the bundled and on large models."""

from __future__ import annotations

import dataclasses
import functools

import diffusers
import pytest
import torch
from torch import nn

from tokenmerge import Correction, MergeSharing, StepReuse, ToMeConfig
from tokenmerge.models.find import find_hosts
from tokenmerge.plans import facts_of, speedup_of
from tokenmerge.report import predict
from tokenmerge_tools.bench.loaded_model import GEOMETRIES
from tokenmerge_tools.demo import path

MERGING = ToMeConfig(ratio=0.5, max_downsample=8, planner="tiled", merge_sharing=MergeSharing(blocks=True))
REUSE = StepReuse(every=3, shallow_every=2)
SETTINGS = {
    "layers": MERGING,
    "wide cells": dataclasses.replace(MERGING, ratio=0.75, sx=4),
    "whole blocks": dataclasses.replace(MERGING, scope="block"),
    "step reuse": dataclasses.replace(MERGING, ratio=0, reuse=REUSE),
    "all": dataclasses.replace(MERGING, reuse=REUSE, correction=Correction(every=2)),
}


def compare(model: nn.Module, side: int, config: ToMeConfig, steps: int) -> None:
    host = find_hosts(model)[0]
    report = predict(model, config, side, side, batch=1, steps=steps)
    counted = report.flops_dense / (report.flops_mean or report.flops_merged)
    facts = facts_of(host, (host.frames, side // host.patch, side // host.patch), steps)
    assert speedup_of(facts, config) == pytest.approx(counted, rel=0.005)


@functools.cache
def bundled(name: str) -> nn.Module:
    folder = path("emoji-unet") / "unet" if name.startswith("UNet") else path("emoji-mmdit") / "transformer"
    return getattr(diffusers, name).from_pretrained(folder)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("side", [32, 64])
@pytest.mark.parametrize("name", ["UNet2DConditionModel", "SD3Transformer2DModel"])
def test_the_speed_up_of_a_bundled_model_is_the_counted_one(name, side, settings):
    compare(bundled(name), side, SETTINGS[settings], steps=20)


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["whole blocks", "all"])
@pytest.mark.parametrize(("name", "side"), [("sd15", 64), ("sdxl", 128), ("sd3", 128), ("flux", 128)])
def test_the_speed_up_of_a_large_model_is_the_counted_one(name, side, settings):
    geometry = GEOMETRIES[name]
    with torch.device("meta"):
        model = getattr(diffusers, geometry.denoiser)(**geometry.config).eval()
    compare(model, side, SETTINGS[settings], steps=8)
