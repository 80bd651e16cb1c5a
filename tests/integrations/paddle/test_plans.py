"""Plans on Paddle's tensors equal those on NumPy, and those of PyTorch in golden.npz."""

from pathlib import Path

import numpy as np
import paddle
import pytest
from integrations.portable import numpy_arrays

from tokenmerge.config import ToMeConfig
from tokenmerge.integrations.portable import (
    PLANNERS,
    MergePlan,
    keep_destinations,
    merge,
    plan_tokens,
    step_number,
    unmerge,
)

GOLDEN = dict(np.load(Path(__file__).parents[1] / "portable" / "golden.npz"))
GRIDS = {name: tuple(map(int, name.split("x"))) for name in GOLDEN if " " not in name}
XP = paddle


def assert_same(ours, theirs):
    for name, mine, other in zip(MergePlan._fields, ours, theirs, strict=True):
        np.testing.assert_array_equal(mine.numpy(), other, err_msg=name)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("planner", PLANNERS)
def test_plans_and_merged_tokens_are_those_of_torch(grid, planner):
    x = paddle.to_tensor(GOLDEN[grid])
    config = ToMeConfig(ratio=0.5, planner=planner, seed=3)
    plan = plan_tokens(XP, x.cast("float64"), GRIDS[grid], config, step_number(481.0))
    assert_same(plan, [GOLDEN[f"{grid} {planner} {field}"] for field in MergePlan._fields])
    merged = GOLDEN[f"{grid} {planner} merged"]
    # Sums of a few float32 numbers near 1.
    assert np.abs(merge(XP, plan, x).numpy() - merged).max() < 1e-6


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("grid", [(40, 36), (17, 13), (4, 70)])
def test_plans_are_those_of_numpy(planner, parts, grid):
    config = ToMeConfig(ratio=0.6, planner=planner)
    x = np.random.default_rng(0).standard_normal((2, grid[0] * grid[1], 8))
    ours = plan_tokens(XP, paddle.to_tensor(x), grid, config, 7, parts)
    theirs = plan_tokens(numpy_arrays, x, grid, config, 7, parts)
    assert_same(ours, theirs)
    y, numpy = paddle.to_tensor(x), numpy_arrays
    np.testing.assert_allclose(merge(XP, ours, y).numpy(), merge(numpy, theirs, x), rtol=1e-12, atol=1e-12)
    kept = keep_destinations(numpy, theirs, x)
    np.testing.assert_array_equal(keep_destinations(XP, ours, y).numpy(), kept)
    np.testing.assert_array_equal(
        unmerge(XP, ours, paddle.to_tensor(kept)).numpy(), unmerge(numpy, theirs, kept)
    )


def test_equal_similarities_stay_in_order():
    x = np.ones((1, 256, 4), np.float32)
    config = ToMeConfig(ratio=0.5)
    assert_same(
        plan_tokens(XP, paddle.to_tensor(x), (16, 16), config, 0),
        plan_tokens(numpy_arrays, x, (16, 16), config, 0),
    )


def test_half_precision_is_summed_in_single_precision():
    # Paddle has no float16 on a CPU. Adding 1000 to a sum of 2¹⁸ changes no bfloat16.
    x = paddle.full([1, 1024, 4], 1000.0, dtype="bfloat16")
    plan = plan_tokens(XP, paddle.ones([1, 1024, 4]), (32, 32), ToMeConfig(ratio=0.75), 0)
    merged = merge(XP, plan, x)
    assert merged.dtype == x.dtype
    assert bool((merged == x[:, : merged.shape[1]]).all())


def test_gradients_flow_through_merging():
    x = paddle.to_tensor(np.random.default_rng(0).standard_normal((1, 64, 4)).astype("float32"))
    x.stop_gradient = False
    plan = plan_tokens(XP, x.detach(), (8, 8), ToMeConfig(ratio=0.5), 0)
    unmerge(XP, plan, merge(XP, plan, x)).sum().backward()
    # Each token's share in its mean, times as many tokens as get that mean: 1.
    assert np.abs(x.grad.numpy() - 1).max() < 1e-6
