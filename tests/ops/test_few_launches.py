"""Ways with fewer launches, which accelerators take, give the same as those of a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from planned import plan_by
from torch import Tensor
from torch.testing import assert_close

from tokenmerge import ToMeConfig
from tokenmerge.ops import matching, plan, tiles
from tokenmerge.ops.plan import MergePlan, keep_destinations

STEP = torch.tensor(7)


@contextmanager
def as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched, torch.no_grad():
        for module in (matching, tiles):
            patched.setattr(module, "WITHOUT_LAUNCHES", set())
        patched.setattr(plan, "_AVERAGING_DEVICES", {"cpu"})
        yield


def random_tokens(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


# Equal boxes, one box, sources beyond the last cell, smaller boxes at the border, and videos.
GRIDS = [(1, 64, 64), (1, 32, 32), (1, 65, 33), (1, 48, 36), (2, 33, 32), (5, 16, 16), (4, 18, 20)]


@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("planner", ["tome", "tiled"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_plans_are_those_of_a_cpu(monkeypatch, planner, grid, seed):
    """In float64, no two of these similarities are so close that rounding decides."""
    settings = ToMeConfig(ratio=0.5, planner=planner, seed=seed, st=min(2, grid[0])).at_level(1)
    for b in (1, 3):
        x = random_tokens(b, math.prod(grid), 6)
        expected = plan_by(planner, x, grid, settings, STEP)
        with as_on_an_accelerator(monkeypatch):
            found = plan_by(planner, x, grid, settings, STEP)
        assert found is not None
        for field, values, others in zip(MergePlan._fields, found, expected, strict=True):
            assert (values is None and others is None) or torch.equal(values, others), (b, field)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("planner", ["tome", "tiled"])
def test_in_half_precision_each_source_has_nearly_the_most_similar_destination(monkeypatch, planner, dtype):
    """Each number of two directions is rounded to float16, and their product once more: by 3 half ulps.

    So the product of the best destination may be that much too small, and that of another as much too large.
    One that is found in bfloat16 is off by more.
    """
    x = (random_tokens(2, 1024, 64) + 1).to(dtype)
    unit = torch.nn.functional.normalize(x.double(), dim=-1)
    with as_on_an_accelerator(monkeypatch):
        used = plan_by(planner, x, (1, 32, 32), ToMeConfig(ratio=0.7).at_level(1), STEP)
    assert isinstance(used, MergePlan)
    of_plan = used.in_images()
    for unit_tokens, keep, sources, targets in zip(
        unit, of_plan.keep, of_plan.sources, of_plan.targets, strict=True
    ):
        cosines = unit_tokens[sources] @ unit_tokens[keep].T
        # Destinations follow the sources that stay, so the most similar token that stays may be a source.
        best = cosines[:, targets.min() :].amax(dim=1)
        assert (best - cosines.gather(1, targets.unsqueeze(1)).squeeze(1) <= 6 * 2**-11).all()


def a_plan(x: Tensor, ratio: float = 0.7) -> MergePlan:
    settings = ToMeConfig(ratio=ratio).at_level(1)
    made = plan_by("tome", x.float(), (1, 16, 16), settings, STEP)
    assert isinstance(made, MergePlan)
    return made


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", [lambda p: p, lambda p: p.after(7), lambda p: p.repeated(2)])
def test_means_of_all_groups_at_once_are_those_one_by_one(
    monkeypatch, dtype: torch.dtype, change: Callable[[MergePlan], MergePlan]
):
    """Both sum in float32 at least. A sum of g numbers is off by g · eps of the sum of their sizes, and a
    mean is rounded twice: by the division and to ``dtype``."""
    used = change(a_plan(random_tokens(2, 256, 8)))
    x = random_tokens(*used.inverse.shape, 8).to(dtype)
    expected, sizes = used.merge(x), used.sizes.unsqueeze(2)
    with as_on_an_accelerator(monkeypatch):
        found = used.merge(x)
    assert found.dtype == dtype
    mean_size = used.merge(x.double().abs())
    summed = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    bound = 2 * mean_size * (sizes * summed + torch.finfo(dtype).eps)
    assert ((found.double() - expected.double()).abs() <= bound).all()
    alone = used.sizes == 1
    assert alone.any()
    assert torch.equal(found[alone], expected[alone])


def test_gradients_and_weights_take_the_other_way(monkeypatch):
    x = random_tokens(2, 256, 4, dtype=torch.float32)
    used = a_plan(x)
    with as_on_an_accelerator(monkeypatch):
        dropped = used._replace(weights=torch.zeros(used.sources.shape), sizes=torch.ones_like(used.sizes))
        assert torch.equal(dropped.merge(x), keep_destinations(dropped, x))
        with torch.enable_grad():
            assert torch.equal(used.merge(x.requires_grad_()), used.merge(x))


def test_tokens_of_text_stay_in_front_as_by_the_general_way():
    used = a_plan(random_tokens(3, 256, 4))
    expected = used.within(torch.full((3,), 5), 5 + 256)
    for field, values, others in zip(MergePlan._fields, used.after(5), expected, strict=True):
        assert (values is None and others is None) or torch.equal(values, others), field
    y = random_tokens(3, expected.keep.shape[1], 4)
    assert_close(used.after(5).unmerge(y), expected.unmerge(y), rtol=0, atol=0)
