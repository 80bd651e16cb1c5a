"""Merging over time: cells of several frames, in the models of video."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch
from tests.models.test_every_family import call, model_of
from tests.models.tiny import FAMILIES
from torch import Tensor
from torch.testing import assert_close

from tokenmerge import ToMeConfig, apply_token_merging
from tokenmerge.config import MergeSettings
from tokenmerge.ops.matching import bipartite_soft_matching
from tokenmerge.ops.partition import strided_partition
from tokenmerge.ops.plan import Plan, make_plan
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


def in_the_order_of_cells(features: Tensor, grid: Any, r: int, config: MergeSettings, step: Tensor) -> Plan:
    """A plan that removes nothing: all tokens in the order of sources and destinations over time."""
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


@pytest.mark.parametrize("features", ["residual", "model_residual"])
def test_tokens_of_two_frames_merge_by_what_blocks_added_a_step_ago(features):
    """The reference loops over the tokens of all frames. The first of three frames has all destinations."""
    family = FAMILIES["WanTransformer3DModel"]
    model, seen = model_of(family), []

    def note(module: Any, args: Any, given: Any, result: Tensor) -> None:
        seen.append(((*args, *given.values())[0][0].double(), result[0].double()))

    for block in model.blocks:
        block.register_forward_hook(note, with_kwargs=True)
    config = ToMeConfig(ratio=0.5, st=2, features=features, seed=None)
    patch = apply_token_merging(model, config)
    patch.at_step(0, 3)
    call(model, family.inputs(1, 8, 8))
    first, last = seen[0][0], seen[-1][1]
    added = [last - first if features == "model_residual" else made - given for given, made in seen]
    patch.at_step(1, 3)
    with patch.record() as recorded:
        call(model, family.inputs(1, 8, 8))
    assert len(recorded) == len(added)
    for place, y in enumerate(added):
        plan = recorded[f"blocks.{place}"].plan
        groups = reference.groups(y.tolist(), reference.destinations(8, 8, 2, 2), family.frames * 32)
        wanted = {i: kept for kept, members in groups.items() for i in members}
        kept, labels = plan.kept()[0].tolist(), plan.labels()[0].tolist()
        assert {i: kept[label] for i, label in enumerate(labels)} == wanted
        assert any(i // 64 != kept // 64 for i, kept in wanted.items())
