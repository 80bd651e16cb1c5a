"""How many kernels a call launches, counted on the meta device."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tokenmerge import ToMeConfig
from tokenmerge.ops import merge, unmerge
from tokenmerge.planners import PLANNERS

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "launches.py"
_spec = importlib.util.spec_from_file_location("launches", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
launches = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(launches)


def of_a_plan(planner: str, side: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """The launches of a plan, after another one in the same step and one in the step before."""
    features = torch.empty(2, side * side, 64, device="meta", dtype=dtype)
    (_, settings), *_ = [(1, stage.at_level(1)) for stage in ToMeConfig(ratio=0.5, planner=planner).stages()]
    step = torch.zeros((), dtype=torch.int64, device="meta")
    for now in (step.clone(), step, step):
        with launches.counting() as counted:
            PLANNERS[planner](features, (1, side, side), side * side // 2, settings, now)
    return counted.of.total()


@pytest.mark.parametrize(("planner", "most"), [("tome", 18), ("tiled", 23)])
def test_the_launches_of_a_plan_do_not_grow_with_the_picture(planner, most):
    sides = (64, 96) if planner == "tome" else (64, 96, 128)
    assert {of_a_plan(planner, side) for side in sides} == {of_a_plan(planner, 64)}
    assert of_a_plan(planner, 64) <= most


def test_a_merge_takes_four_launches_and_an_unmerge_one():
    features = torch.empty(2, 256, 8, device="meta", dtype=torch.bfloat16)
    settings = next(iter(ToMeConfig(ratio=0.5).stages())).at_level(1)
    step = torch.zeros((), dtype=torch.int64, device="meta")
    plan = PLANNERS["tome"](features, (1, 16, 16), 128, settings, step)
    with launches.counting() as counted:
        merged = merge(plan, features)
    assert counted.of.total() == 4, counted.of
    with launches.counting() as counted:
        unmerge(plan, merged)
    assert counted.of.total() == 1, counted.of
