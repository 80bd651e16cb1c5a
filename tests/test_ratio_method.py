"""Token merging alone: ``apply_token_merging(pipe, ratio=0.5)``."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import hosts
import pytest
import torch
from diffusers import DDIMScheduler
from tests.models.test_every_family import call, model_of
from tests.models.tiny import FAMILIES

from tokenmerge import MergeSharing, ToMeConfig, apply_token_merging, ratio_method
from tokenmerge.models.find import find_hosts
from tokenmerge.plans import facts_of, share_that_merges

SD3 = FAMILIES["SD3Transformer2DModel"]


def pipeline(**models: Any) -> SimpleNamespace:
    """A pipeline whose scheduler has eight steps."""
    scheduler = DDIMScheduler()
    scheduler.set_timesteps(8)
    return SimpleNamespace(**models, scheduler=scheduler)


def test_in_the_pipeline_of_a_transformer_tokens_merge_once_for_all_blocks():
    config = apply_token_merging(pipeline(transformer=model_of(SD3)), ratio=0.4).config
    assert (config.ratio, config.scope, config.features) == (0.4, "block", "model_residual")
    assert config.merge_sharing.blocks
    assert config.proportional
    assert config.correction.on
    assert [config.at_step(step, 4).ratio for step in range(4)] == [0.46, 0.42, 0.38, 0.34]


def test_its_first_step_is_dense_and_all_others_merge():
    model = model_of(SD3)
    patch = apply_token_merging(pipeline(transformer=model), ratio=0.5)
    patch.record_steps()
    arguments = SD3.inputs(2, 16, 16)
    dense = call(model_of(SD3), arguments)
    results = []
    for index in range(8):
        patch.at_step(index, 8)
        results.append(call(model, arguments))
    assert torch.equal(results[0], dense)
    assert [row.merging_calls > 0 for row in patch.steps.rows] == [False, *[True] * 7]
    assert "C in 1 full step: " in repr(patch)
    assert "M in 7 full steps: " in repr(patch)
    # In the first quarter of the steps, 0.575 of the 256 tokens merge.
    assert "256 → 109 tokens" in repr(patch)
    assert "in the step that merges most" in repr(patch)


@pytest.mark.parametrize("make", [hosts.unet, lambda: model_of(SD3)])
def test_a_unet_and_a_model_alone_merge_around_attention(make):
    model = make()
    target = pipeline(unet=model) if type(model).__name__.startswith("UNet") else model
    config = apply_token_merging(target, ratio=0.5).config
    assert config == ToMeConfig(
        ratio=0.5, planner="tiled", proportional=True, merge_sharing=MergeSharing(blocks=True)
    )
    assert not config.follows_steps


@pytest.mark.parametrize(
    ("share", "device", "warns"),
    [(0.19, "cuda", True), (0.21, "cuda", False), (0.11, "cpu", False), (0.09, "cpu", True)],
)
def test_it_says_where_merging_saves_nothing(share, device, warns, monkeypatch):
    monkeypatch.setattr(ratio_method, "share_that_merges", lambda *_: share)
    monkeypatch.setattr(ratio_method, "device_of", lambda *_: torch.device(device))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        apply_token_merging(pipeline(unet=hosts.unet()), ratio=0.5)
    told = [str(one.message) for one in caught if "saves next to no time" in str(one.message)]
    assert len(told) == warns
    assert all("speedup=2.0" in one and f"{share:.0%}" in one for one in told)


def test_the_share_of_what_merges_grows_with_the_size_of_the_picture():
    """Attention is quadratic in the tokens, and all else is linear."""
    host = find_hosts(hosts.unet())[0]
    config = ToMeConfig(ratio=0.5, planner="tiled")
    shares = [share_that_merges(facts_of(host, (1, side, side), 20), config) for side in (8, 16, 32, 64)]
    assert 0 < shares[0] < shares[1] < shares[2] < shares[3] < 1
    assert share_that_merges(facts_of(host, (1, 16, 16), 20), ToMeConfig(ratio=0.0)) == 0
