"""How many kernels a call launches, counted on the meta device."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokenmerge import ToMeConfig
from tokenmerge.planners import PLANNERS
from tokenmerge.runtime.blocks.merged_call import combined

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "launches.py"
_spec = importlib.util.spec_from_file_location("launches", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
launches = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(launches)


def of_a_plan(planner: str, side: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """The launches of a plan, after another one in the same step and one in the step before."""
    features = torch.empty(2, side * side, 64, device="meta", dtype=dtype)
    settings = ToMeConfig(ratio=0.5, planner=planner).at_level(1)
    step = torch.zeros((), dtype=torch.int64, device="meta")
    for now in (step.clone(), step, step):
        with launches.counting() as counted:
            PLANNERS[planner](features, (1, side, side), side * side // 2, settings, now)
    return counted.of.total()


@pytest.mark.parametrize(("planner", "most"), [("tome", 14), ("tiled", 14)])
def test_the_launches_of_a_plan_do_not_grow_with_the_picture(planner, most):
    sides = (64, 96) if planner == "tome" else (64, 96, 128)
    assert {of_a_plan(planner, side) for side in sides} == {of_a_plan(planner, 64)}
    assert of_a_plan(planner, 64) <= most


def test_a_merge_takes_one_launch_after_the_first_and_an_unmerge_one():
    features = torch.empty(2, 256, 8, device="meta", dtype=torch.bfloat16)
    settings = ToMeConfig(ratio=0.5).at_level(1)
    step = torch.zeros((), dtype=torch.int64, device="meta")
    plan = PLANNERS["tome"](features, (1, 16, 16), 128, settings, step)
    with torch.no_grad():  # what the sizes alone need is made once
        plan._replace(inverse=plan.inverse.clone()).merge(features)
    for most in (3, 1):  # the first one sorts the tokens by where they merge
        with launches.counting() as counted:
            merged = plan.merge(features)
        assert counted.of.total() == most, counted.of
    with launches.counting() as counted:
        plan.unmerge(merged)
    assert counted.of.total() == 1, counted.of


class Bytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations read and write; views read and write nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if not any(
            one.alias_info is not None and not one.alias_info.is_write for one in function._schema.returns
        ):
            for value in tree_leaves((args, kwargs, made)):
                self.total += value.nbytes if isinstance(value, torch.Tensor) else 0
        return made


@pytest.mark.parametrize("channels", [320, 3072])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("combine", ["mean", "keep"])
def test_merging_and_unmerging_move_little_more_than_the_tokens(combine, dtype, channels):
    """Merging must read the n tokens and write the m merged ones, or read only those that it keeps."""
    x = torch.empty(2, 4096, channels, device="meta", dtype=dtype)
    step = torch.zeros((), dtype=torch.int64, device="meta")
    settings = ToMeConfig(ratio=0.5, planner="tiled").at_level(1)
    plan = PLANNERS["tiled"](x, (1, 64, 64), 2048, settings, step)
    with torch.no_grad():
        y = combined(plan, x, combine)  # what the plan alone needs is made once
        assert y.shape[1] == 2048
        for function, value in ((lambda value: combined(plan, value, combine), x), (plan.unmerge, y)):
            with Bytes() as counted:
                function(value)
            assert 0 < counted.total <= 1.1 * (x.nbytes + y.nbytes)


# tomesd launches 904 on Stable Diffusion 1.5. Dense, it is 759, and FLUX.1 4021.
@pytest.mark.parametrize(
    ("name", "sides", "method", "most"),
    [
        ("sd15", (512, 768, 1024), "`apply_patch(ratio=0.5)`", 903),
        ("sd15", (512, 768, 1024), "as `auto` merges", 830),
        ("sd15", (512, 1024), "`presets.todo()`", 764),
        ("flux", (1024,), "as `auto` merges", 4250),
    ],
)
def test_a_merged_call_launches_few_kernels(name, sides, method, most, models):
    found = {side: launches.merged(name, models(name), side, side, method) for side in sides}
    assert max(found.values()) <= most, found
    if method != launches.OLD_CALL:
        assert len(set(found.values())) == 1, found  # as many tiles as one likes


# The bound is what was recorded last. A change that launches fewer records its counts and so lowers it.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd3", "flux", "wan"])
def test_a_step_of_a_stack_launches_no_more_than_was_recorded(name, models):
    model, (height, width) = models(name), launches.SIZES[name][0]
    title = f"{launches.find_geometry(name).title}, {width} × {height}"
    counted = launches.in_a_stack(name, model, height, width)
    assert counted.total() <= launches.recorded()[title, launches.IN_A_STACK][-1]
    dense = launches.launches(model, launches.example(name, model, height, width))
    assert dense.total() == launches.recorded()[title, "dense"][-1]
    assert counted.total() > dense.total()  # tokens merge
    assert counted["scaled_dot_product_attention"] == dense["scaled_dot_product_attention"]


def test_the_page_has_the_recorded_launches(tmp_path, monkeypatch):
    """If this fails: `python benchmarks/launches.py --table`."""
    written = tmp_path / "page.md"
    written.write_text(launches.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(launches, "PAGE", written)
    launches.write_table()
    page = SCRIPT.parents[1] / "docs" / "launches.md"
    assert written.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def models():
    return functools.cache(launches.build)
