"""Merging written for any array library plans and merges as the PyTorch code does."""

import numpy as np
import pytest
import torch
from integrations.portable import numpy_arrays
from planned import plan_by

from tokenmerge import ToMeConfig
from tokenmerge.integrations import portable
from tokenmerge.integrations.portable import (
    keep_destinations,
    merge,
    own_cell,
    partition,
    shared_features,
    step_number,
    unmerge,
)
from tokenmerge.ops import matching
from tokenmerge.ops import plan as torch_plan
from tokenmerge.ops.partition import strided_partition

XP = numpy_arrays
GRIDS = [(16, 16), (17, 13), (4, 70), (40, 36)]
CELLS = [(2, 2), (3, 4), (1, 2)]


def features(grid, batch=2, channels=8, dtype=np.float64):
    return np.random.default_rng(0).standard_normal((batch, grid[0] * grid[1], channels)).astype(dtype)


def torch_step(timestep):
    return torch.tensor(timestep, dtype=torch.float32).view(torch.int32).to(torch.int64)


def assert_same(ours, theirs):
    for name in ("keep", "sources", "targets", "inverse", "sizes"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name).numpy(), err_msg=name)


@pytest.mark.parametrize("seed", [0, 7, -3, 2**40])
@pytest.mark.parametrize("timestep", [0.0, 1.0, 999.0, 523.25, -1.5])
def test_partitions_are_the_same_numbers(seed, timestep):
    for grid in GRIDS:
        for cell in CELLS:
            ours = partition(grid, cell, (seed, step_number(timestep)))
            theirs = strided_partition(grid, cell, draw=(seed, torch_step(timestep)))
            for mine, other in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(mine, other.numpy())


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("cell", CELLS)
def test_without_a_draw_partitions_and_cells_are_the_same(grid, cell):
    ours, theirs = partition(grid, cell), strided_partition(grid, cell)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, other.numpy())
    tokens = np.arange(grid[0] * grid[1])
    theirs = matching.own_cell(grid, cell, torch.from_numpy(tokens))
    np.testing.assert_array_equal(own_cell(grid, cell, tokens), theirs.numpy())


# In float64 no two similarities of random tokens are so close that another order of summation swaps them.
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("planner", portable.PLANNERS)
@pytest.mark.parametrize("use_rand", [True, False])
def test_plans_are_the_same(grid, cell, planner, use_rand):
    config = ToMeConfig(ratio=0.5, sy=cell[0], sx=cell[1], planner=planner, seed=3 if use_rand else None)
    x = features(grid)
    ours = portable.plan_tokens(XP, x, grid, config, step_number(481.0))
    theirs = plan_by(planner, torch.from_numpy(x), (1, *grid), config, torch_step(481.0))
    assert_same(ours, theirs)
    removed = grid[0] * grid[1] - ours.keep.shape[1]
    assert removed == portable.num_removed(grid, config) > 0


@pytest.mark.parametrize("planner", portable.PLANNERS)
def test_merged_and_unmerged_tokens_are_the_same(planner):
    grid, config = (16, 16), ToMeConfig(ratio=0.6, planner=planner)
    x = features(grid, dtype=np.float32)
    ours = portable.plan_tokens(XP, x.astype(np.float64), grid, config, step_number(1.0))
    theirs = plan_by(planner, torch.from_numpy(x).double(), (1, *grid), config, torch_step(1.0))
    merged = merge(XP, ours, x)
    # A group has tens of tokens of size 1, whose sum is off by their number times 2⁻²⁴ at most.
    assert np.abs(merged - theirs.merge(torch.from_numpy(x)).numpy()).max() < 1e-6
    np.testing.assert_array_equal(
        keep_destinations(XP, ours, x), torch_plan.keep_destinations(theirs, torch.from_numpy(x)).numpy()
    )
    np.testing.assert_array_equal(unmerge(XP, ours, merged), theirs.unmerge(torch.from_numpy(merged)).numpy())


def test_half_precision_is_summed_in_single_precision():
    grid = (32, 32)
    x = np.ones((1, 1024, 4), np.float16) * np.float16(1000)  # a sum of 257 of them is no float16
    plan = portable.plan_tokens(XP, x.astype(np.float32), grid, ToMeConfig(ratio=0.75), 0)
    merged = merge(XP, plan, x)
    assert merged.dtype == np.float16
    np.testing.assert_array_equal(merged, x[:, : merged.shape[1]])


def test_plans_shared_by_guidance_are_the_same():
    grid, config = (16, 16), ToMeConfig(ratio=0.5)
    x = features(grid, batch=4)
    shared = matching.shared_features(torch.from_numpy(x), 2)
    np.testing.assert_allclose(shared_features(XP, x, 2), shared.numpy(), rtol=1e-12)
    ours = portable.plan_tokens(XP, x, grid, config, step_number(5.0), parts=2)
    theirs = plan_by("tome", shared, (1, *grid), config, torch_step(5.0)).repeated(2)
    assert_same(ours, theirs)


@pytest.mark.parametrize(
    ("grid", "settings"),
    [((1, 9), {}), ((16, 16), {"ratio": 0}), ((8, 8), {"min_tokens": 65}), ((4, 4), {"sx": 5, "ratio": 0.8})],
)
def test_nothing_is_planned_where_nothing_can_merge(grid, settings):
    config = ToMeConfig(**{"ratio": 0.5, **settings})
    assert portable.num_removed(grid, config) == 0
    assert portable.plan_tokens(XP, features(grid), grid, config, 0) is None


def test_similarities_held_at_once_change_nothing(monkeypatch):
    grid, config = (16, 16), ToMeConfig(ratio=0.5)
    x = features(grid)
    before = portable.plan_tokens(XP, x, grid, config, 0)
    monkeypatch.setattr("tokenmerge.integrations.portable._SIMILARITIES_AT_ONCE", 1000)
    assert_same(before, type(before)(*map(torch.from_numpy, portable.plan_tokens(XP, x, grid, config, 0))))
