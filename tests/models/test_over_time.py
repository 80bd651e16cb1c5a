"""Merging over time: cells of several frames, in the models of video."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.models.test_every_family import call, model_of
from tests.models.tiny import FAMILIES
from tokenmerge import ToMeConfig, apply_token_merging
from tokenmerge.ops import Plan, bipartite_soft_matching, make_plan, strided_partition
from tokenmerge.planners import PLANNERS

VIDEOS = pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.frames > 1])
OVER_TIME = ToMeConfig(ratio=0.5, st=2)


@pytest.mark.parametrize("st", [1, 2])
@pytest.mark.parametrize("name", ["WanTransformer3DModel", "HunyuanVideoTransformer3DModel"])
def test_tokens_of_different_frames_merge_only_when_asked_to(name, st):
    family = FAMILIES[name]
    model = model_of(family)
    patch = apply_token_merging(model, ToMeConfig(ratio=0.5, st=st))
    with patch.record() as recorded:
        call(model, family.inputs(2, 8, 8))
    assert recorded
    for plan, grid in ((r.plan, r.grid) for r in recorded.values()):
        assert grid == (family.frames, 8, 8)
        frame = torch.arange(64 * family.frames) // 64
        first_frame = plan.kept().gather(1, plan.labels()) // 64  # of the token that stands for each
        assert bool((first_frame != frame).any()) == (st > 1)


def in_the_order_of_cells(features: Tensor, grid: Any, config: ToMeConfig, step: Tensor) -> Plan:
    """Nothing removed: all tokens in the order of the sources and destinations of merging over time."""
    src, dst = strided_partition(grid, (config.st, config.sy, config.sx), draw=(0, step))
    order, nearest = bipartite_soft_matching(features, src, dst)
    return make_plan(src, dst, order, nearest, r=0)


@VIDEOS
def test_the_order_of_merging_over_time_changes_nothing(name, monkeypatch):
    family = FAMILIES[name]
    model, arguments = model_of(family), family.inputs(2, 7, 5)
    dense = call(model, arguments)
    monkeypatch.setitem(PLANNERS, "tome", in_the_order_of_cells)
    apply_token_merging(model, OVER_TIME)
    assert_close(call(model, arguments), dense, rtol=1e-5, atol=1e-5 * dense.abs().max().item())


@VIDEOS
def test_a_video_merged_over_time_is_finite_and_not_the_dense_one(name):
    family = FAMILIES[name]
    model, arguments = model_of(family), family.inputs(1, 6, 8)
    dense = call(model, arguments)
    apply_token_merging(model, OVER_TIME)
    merged = call(model, arguments)
    assert torch.isfinite(merged).all()
    assert not torch.equal(merged, dense)
