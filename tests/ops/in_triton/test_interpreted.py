"""The kernels by Triton's interpreter on a CPU, compared with PyTorch's operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import hosts
import pytest
import torch
from benchmarks.launches import Launches
from planned import plan_by
from torch import Tensor

from tokenmerge import ToMeConfig, apply_token_merging
from tokenmerge.ops import add_unmerged, kernels, matching, most_similar, strided_partition, tiles, unmerge

# The interpreter is wrong in bfloat16. test_compiled.py only translates the kernels for it.
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16])


@pytest.fixture(autouse=True)
def _on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(kernels, "devices", {"cpu", "meta"})


@contextmanager
def by_pytorch() -> Iterator[None]:
    on, kernels.ON = kernels.ON, False
    try:
        yield
    finally:
        kernels.ON = on


def calls(launches: Launches) -> list[int]:
    """How often each kernel was launched."""
    return [launches.of[f"tokenmerge::{name}"] for name in ("largest_products", "add_rows")]


def check_products(a: Tensor, b: Tensor, places: Tensor, windows: Tensor) -> None:
    """Compare with the exact products, and with what PyTorch computes, up to rounding."""
    product, nearest = kernels.largest_products(a, b, places, windows)
    with by_pytorch():
        their_product, theirs = tiles._best(a, b, places, windows)
    left, right = a.double()[:, places], b.double()[:, windows]  # [b, t, q, c] and [b, t, w, c]
    exact = left @ right.mT
    # A float32 sum of c products, in any order, is at most c · 2⁻²⁴ · |a| · |b| away from the exact one.
    rounding = a.shape[2] * 2**-24 * left.norm(dim=-1) * right.norm(dim=-1).amax(-1, keepdim=True)
    best, at = exact.max(dim=-1)
    rounding, best = rounding.flatten(1), best.flatten(1)
    assert ((product - best).abs() <= rounding).all()
    assert ((product - their_product).abs() <= 2 * rounding).all()
    # So the largest is found wherever the next one is more than twice that below it.
    right_one = windows.expand(len(a), -1, -1).gather(2, at)
    others = windows.view(1, len(windows), 1, -1) != right_one.unsqueeze(-1)
    next_best = exact.where(others, -torch.inf).amax(-1).flatten(1)
    clear = best - next_best > 2 * rounding
    assert torch.equal(nearest[clear], right_one.flatten(1)[clear])
    assert torch.equal(nearest[clear], theirs[clear])
    assert clear.float().mean() > 0.99


@pytest.mark.parametrize(
    ("b", "s", "d", "t", "q", "w", "c"),
    [
        (1, 1, 1, 1, 1, 1, 1),
        (2, 64, 128, 1, 64, 128, 32),  # whole blocks
        (1, 65, 129, 1, 65, 129, 33),  # one more than whole blocks
        (3, 70, 1, 1, 70, 1, 7),  # one destination
        (2, 100, 50, 3, 37, 30, 40),  # several tiles
    ],
)
def test_the_largest_products_are_found(b, s, d, t, q, w, c):
    tokens = torch.randn(b, s + d, c)
    a, destinations = tokens[:, :s], torch.nn.functional.normalize(tokens[:, s:], dim=-1)
    places = torch.stack([torch.randperm(s)[:q] for _ in range(t)])
    windows = torch.stack([torch.randperm(d)[:w] for _ in range(t)])
    windows[-1, w // 2 :] = windows[-1, w // 2]  # smaller windows repeat their last destination
    check_products(a, destinations, places, windows)


def sparse(b: int, n: int, c: int, dtype: torch.dtype) -> Tensor:
    """Tokens with one number other than 0, so that products and lengths are exact, and many are equal."""
    at = torch.randint(c, (b, n, 1))
    return torch.zeros(b, n, c, dtype=dtype).scatter(2, at, torch.randint(1, 9, at.shape).to(dtype))


@TYPES
def test_of_equal_products_the_first_is_taken_as_by_pytorch(dtype):
    x = sparse(2, 300, 40, dtype)
    src, dst = torch.arange(130), torch.arange(130, 300)
    with Launches() as launches:
        found = most_similar(x, src, dst)
    assert calls(launches) == [1, 0]
    with by_pytorch():
        expected = most_similar(x, src, dst)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@TYPES
@pytest.mark.parametrize("per_image", [False, True])
def test_tokens_of_either_precision_are_matched_in_float32(dtype, per_image):
    x = torch.randn(2, 19 * 13, 24).to(dtype)
    src, dst = strided_partition((19, 13), (2, 2), draw=(0, torch.tensor(7)))
    if per_image:
        src, dst = torch.stack([src, src.flip(0)]), torch.stack([dst, dst.flip(0)])
    similarity, nearest = most_similar(x, src, dst)
    with by_pytorch():
        expected, theirs = most_similar(x, src, dst)
    assert similarity.dtype == torch.float32
    # Twice the rounding of a sum, as in check_products; division by the length adds half a unit to each.
    torch.testing.assert_close(similarity, expected, rtol=0, atol=2 * (24 + 1) * 2**-24)
    assert torch.equal(nearest, theirs)  # no two products of these tokens are that close


def test_many_tokens_are_matched():
    x = torch.randn(1, 4096, 8)
    src, dst = strided_partition((64, 64), (2, 2), draw=(0, torch.tensor(7)))
    a, _, b = matching.compared(x, src, dst)
    check_products(a, b, torch.arange(3072).unsqueeze(0), torch.arange(1024).unsqueeze(0))


@pytest.mark.parametrize("grid", [(1, 36, 36), (1, 21, 35), (3, 18, 18)])
@pytest.mark.parametrize(("planner", "at_once"), [("tome", True), ("tiled", False), ("tiled", True)])
def test_plans_are_those_of_pytorch(planner, grid, at_once, monkeypatch):
    if at_once:  # all tiles in one product, as on an accelerator
        for module in (matching, tiles):
            monkeypatch.setattr(module, "WITHOUT_LAUNCHES", set())
        monkeypatch.setattr(tiles, "_one_by_one", tiles._at_once)
        monkeypatch.setattr(tiles, "_layout", tiles._layout.__wrapped__)
    monkeypatch.setattr("tokenmerge.planners.tiled.SIDES", {2: (8, 8)})
    x = sparse(2, grid[0] * grid[1] * grid[2], 8, torch.float16)
    with Launches() as launches:
        mine = plan_by(planner, x, grid, ToMeConfig(ratio=0.5), torch.tensor(5))
    assert calls(launches)[0] == 1 if at_once else calls(launches)[0] > 1
    with by_pytorch():
        theirs = plan_by(planner, x, grid, ToMeConfig(ratio=0.5), torch.tensor(5))
    for one, other in zip(mine, theirs, strict=True):
        assert one is other is None or torch.equal(one, other)


@TYPES
@pytest.mark.parametrize(
    ("b", "grid", "c"), [(1, (2, 2), 1), (2, (8, 8), 128), (3, (7, 5), 129), (1, (64, 32), 24)]
)
def test_unmerging_adds_the_same_bits(b, grid, c, dtype):
    n = grid[0] * grid[1]
    plan = plan_by("uniform", torch.randn(b, n, c), (1, *grid), ToMeConfig(ratio=0.5), torch.tensor(5))
    m = plan.keep.shape[1]
    x, y = torch.randn(b, n, c).to(dtype), torch.randn(b, m, c).to(dtype)
    behind_text = torch.randn(b, n + 3, c).to(dtype)[:, 3:]
    turned = torch.randn(b, c, m).to(dtype).transpose(1, 2)
    for one, other in ((x, y), (behind_text, y), (x, turned)):
        with Launches() as launches:
            found = add_unmerged(plan, one, other)
        assert calls(launches) == [0, 1]
        assert torch.equal(found, one + unmerge(plan, other))


def test_a_patched_model_draws_the_same_bits():
    model, arguments = hosts.unet(), hosts.inputs()
    apply_token_merging(model, ToMeConfig(ratio=0.5, scope="block", planner="uniform", max_downsample=2))
    with torch.no_grad():
        with Launches() as launches:
            mine = hosts.call(model, **arguments)
        assert calls(launches) == [0, 7]  # blocks
        with by_pytorch():
            theirs = hosts.call(model, **arguments)
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("planner", ["tome", "tiled"])
def test_a_plan_takes_one_launch_less(planner):
    x, step = torch.empty(2, 1024, 64, device="meta"), torch.zeros((), dtype=torch.int64, device="meta")

    def launched() -> int:
        for _ in range(2):  # what depends on the grid alone is made once
            with Launches() as launches:
                plan_by(planner, x, (1, 32, 32), ToMeConfig(ratio=0.5), step)
        return launches.of.total()

    with by_pytorch():
        before = launched()
    assert launched() == before - 1


def test_with_gradients_in_traces_and_in_float64_pytorch_computes():
    plan = plan_by("uniform", torch.randn(1, 64, 4), (1, 8, 8), ToMeConfig(ratio=0.5), torch.tensor(5))
    x, y = torch.randn(1, 64, 4), torch.randn(1, 32, 4, requires_grad=True)
    with Launches() as launches:
        add_unmerged(plan, x, y).sum().backward()
        assert y.grad is not None
        assert y.grad.sum() == 64 * 4
        add_unmerged(plan, x.double(), y.detach().double())
        add_unmerged(plan, x, y.detach().half())
        most_similar(x.double(), torch.arange(32), torch.arange(32, 64))
        torch.jit.trace(lambda x, y: add_unmerged(plan, x, y), (x, y.detach()), check_trace=False)
        torch.export.export(_Add(plan), (x, y.detach()))
    assert calls(launches) == [0, 0]


class _Add(torch.nn.Module):
    def __init__(self, plan: object) -> None:
        super().__init__()
        self.plan = plan

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return add_unmerged(self.plan, x, y)


def test_the_operators_tell_pytorch_the_shapes_of_what_they_return():
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    x, rows = torch.randn(2, 5, 3).half(), torch.randint(8, (2, 5))
    torch.library.opcheck(kernels.add_rows, (x, torch.randn(2, 4, 3).half(), rows), test_utils=checks)
    places, windows = torch.randint(5, (3, 2)), torch.randint(4, (3, 4))
    a, b = torch.randn(2, 5, 3), torch.randn(2, 4, 3)
    torch.library.opcheck(kernels.largest_products, (a, b, places, windows), test_utils=checks)
