"""What must hold for every planner: any grid, any batch, any precision."""

from __future__ import annotations

import dataclasses
import functools
import math
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import plan_by
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import tokenmerge.config
from tokenmerge import planners
from tokenmerge.config import GUIDED_PLANNERS, OWN_NUMBER, ToMeConfig, highest_ratio
from tokenmerge.config.settings import TRAITS
from tokenmerge.ops.plan import Plan, keep_destinations
from tokenmerge.ops.soft import SoftPlan
from tokenmerge.planners import PLANNERS
from tokenmerge.planners.sequences import num_removed, plan_pictures, sequence_of

EVERY = pytest.mark.parametrize("name", PLANNERS)
# Planners that draw nothing at random, with or without a seed.
NOT_DRAWN = ("toma",)
# These compare no pairs of tokens, or compare them by sums alone.
COMPARES_NOTHING_BY_PRODUCTS = ("uniform", "windows")

seeds = st.integers(0, 2**40)


def settings_of(name: str, **changes) -> ToMeConfig:
    return ToMeConfig(planner=name, **{"ratio": 0.5, **changes})


def plan(name: str, x: Tensor, grid, config: ToMeConfig, step: int = 3) -> Plan | None:
    extra = (x.detach().double().sin().sum(dim=2).abs(),) if name in GUIDED_PLANNERS else ()
    return plan_by(name, x, grid, config, torch.tensor(step, device=x.device), *extra)


def tokens(b: int, grid, c: int = 6, seed: int = 0) -> Tensor:
    return torch.randn(b, math.prod(grid), c, generator=torch.Generator().manual_seed(seed))


@st.composite
def cases(draw):
    sx, sy = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    grid = draw(st.integers(1, 3)), draw(st.integers(sy, 9)), draw(st.integers(sx, 9))
    ratio = draw(st.floats(0, 1)) * highest_ratio(sx, sy)
    changes = {"ratio": ratio, "sx": sx, "sy": sy, "seed": draw(st.none() | seeds)}
    return changes, grid, tokens(draw(st.integers(1, 3)), grid, seed=draw(seeds))


def removed(name: str, grid, config: ToMeConfig) -> int:
    """How many tokens should be removed; each planner in OWN_NUMBER has its own line."""
    frames, n, k = grid[0], grid[1] * grid[2], config.sx * config.sy
    r, cells = num_removed(grid, config), (grid[1] // config.sy) * (grid[2] // config.sx)
    if r and name == "uniform":
        return frames * (n - cells)
    if r and name == "windows":
        return frames * min(cells, max(1, r // frames // (k - 1))) * (k - 1)
    return r


def test_settings_take_every_planner():
    assert tuple(PLANNERS) == tokenmerge.config.PLANNERS
    assert {"tome", "importance"} <= set(PLANNERS)


def test_each_file_with_a_planner_has_a_line_in_the_table_of_traits():
    folder = Path(planners.__file__).parent
    files = {file.stem for file in folder.glob("*.py") if f"def plan_{file.stem}(" in file.read_text("utf-8")}
    assert files == set(TRAITS)
    # Settings and messages name the planners in this order.
    assert list(TRAITS) == sorted(TRAITS)


@EVERY
def test_the_table_says_which_planner_looks_at_guidance(name):
    part = getattr(import_module(f"tokenmerge.planners.{name}"), f"plan_{name}")
    assert ("importance" in signature(part).parameters) == TRAITS[name].guided


@EVERY
def test_the_table_says_which_planner_makes_soft_plans(name):
    grid = (1, 8, 8)
    planned = plan(name, tokens(1, grid), grid, settings_of(name, ratio=0.3))
    assert isinstance(planned, SoftPlan) == TRAITS[name].soft


@EVERY
def test_the_table_says_which_planner_compares_no_tokens(name):
    """With the others, other tokens merge if the features are others."""
    grid, config = (1, 8, 8), settings_of(name, ratio=0.3)
    first, second = (plan(name, tokens(1, grid, seed=seed), grid, config).labels() for seed in (0, 1))
    assert torch.equal(first, second) == TRAITS[name].compares_nothing


@EVERY
def test_the_table_says_which_planner_takes_cells_over_time(name):
    """Settings refuse such cells with the other planners."""
    if TRAITS[name].over_time:
        grid = (4, 8, 8)
        planned = plan(name, tokens(1, grid), grid, settings_of(name, ratio=0.5, st=2))
        assert planned.keep.shape[1] == 128
    else:
        with pytest.raises(tokenmerge.ConfigError, match="stays within a frame"):
            settings_of(name, st=2)


@EVERY
def test_planners_that_remove_a_number_of_their_own_are_listed(name):
    """The highest possible saving depends on this number (tokenmerge_tools.variants.contexts)."""
    grid, config = (1, 8, 8), settings_of(name, ratio=0.3)
    planned = plan(name, tokens(1, grid), grid, config)
    as_the_ratio_says = planned.keep.shape[1] == 64 - num_removed(grid, config)
    assert as_the_ratio_says == (name not in OWN_NUMBER)


@EVERY
@settings(max_examples=25)
@given(case=cases())
def test_r_tokens_go_and_every_token_has_one_that_stands_for_it(name, case):
    changes, grid, x = case
    config = settings_of(name, **changes)
    planned = plan(name, x, grid, config)
    r, n = removed(name, grid, config), math.prod(grid)
    if r == 0:
        assert planned is None
        return
    b, m = len(x), n - r
    assert planned.keep.shape == planned.sizes.shape == (b, m)
    assert planned.inverse.shape == (b, n)
    image = torch.arange(b).unsqueeze(1)
    assert torch.equal(planned.keep // n, image.expand(b, m))
    assert torch.equal(planned.inverse // m, image.expand(b, n))
    assert all(len(set(row)) == m for row in planned.kept().tolist())
    if not isinstance(planned, SoftPlan):
        assert torch.equal(planned.labels().gather(1, planned.kept()), torch.arange(m).expand(b, -1))
    if name != "threshold":
        assert_close(planned.sizes.sum(dim=1), torch.full((b,), float(n)), rtol=1e-5, atol=0)


@EVERY
@settings(max_examples=25)
@given(case=cases())
def test_images_and_frames_merge_within_themselves_whatever_is_beside_them(name, case):
    changes, grid, x = case
    config = settings_of(name, **changes)
    planned = plan(name, x, grid, config)
    if planned is None:
        return
    frame = torch.arange(grid[0]).repeat_interleave(grid[1] * grid[2]).expand(len(x), -1)
    assert torch.equal(frame.gather(1, planned.kept()).gather(1, planned.labels()), frame)
    for i in range(len(x)):
        alone = plan(name, x[i : i + 1], grid, config)
        assert torch.equal(planned.kept()[i], alone.kept()[0])
        assert torch.equal(planned.labels()[i], alone.labels()[0])
        assert torch.equal(planned.sizes[i], alone.sizes[0])


@EVERY
@pytest.mark.parametrize("cell", [2, 3])
def test_features_that_differ_by_rounding_are_planned_alike(name, cell):
    """So an image does not depend on the number of images beside it, with which sums are rounded.

    The cosines differ by 2⁻²² at most, and so the logarithms of shares by 1000 times as much.
    """
    grid, config = (2, 18, 18), settings_of(name, sx=cell, sy=cell)
    x = tokens(2, grid)
    rounded = x * (1 + (tokens(2, grid, seed=1) / 4).clamp(-1, 1) * 2**-23)
    planned, again = plan(name, x, grid, config), plan(name, rounded, grid, config)
    assert torch.equal(planned.kept(), again.kept())
    assert torch.equal(planned.labels(), again.labels())
    assert_close(planned.sizes, again.sizes, rtol=1000 * 2**-22, atol=0)


@EVERY
@pytest.mark.parametrize("broken", [slice(5, 6), slice(None)])
def test_what_is_no_number_in_one_picture_stays_there(name, broken):
    """Also where images of a batch share a plan, made from the mean of their features."""
    grid, config = (2, 7, 9), settings_of(name)
    x = tokens(3, grid)
    beside = x.clone()
    beside[1, broken] = math.nan
    planned, others = plan(name, x, grid, config), plan(name, beside, grid, config)
    for i in (0, 2):
        assert torch.equal(planned.labels()[i], others.labels()[i])
        assert torch.equal(planned.sizes[i], others.sizes[i])
    shared = plan(name, beside.mean(dim=0, keepdim=True), grid, config)
    for merged in (shared.merge(x[:1]), keep_destinations(shared, x[:1])):
        assert shared.unmerge(merged).isfinite().all()


@EVERY
@settings(max_examples=25)
@given(case=cases())
def test_what_is_equal_everywhere_stays_so(name, case):
    """Means of at most 243 equal numbers: each addition rounds by half an ulp at most."""
    changes, grid, x = case
    planned = plan(name, x, grid, settings_of(name, **changes))
    if planned is None:
        return
    same = torch.full_like(x, 0.3)
    close = functools.partial(assert_close, rtol=243 * 2**-24, atol=0)
    merged = planned.merge(same)
    close(merged, same[:, : merged.shape[1]])
    close(planned.unmerge(merged), same)
    assert torch.equal(keep_destinations(planned, x), x.take_along_dim(planned.kept().unsqueeze(-1), dim=1))


@EVERY
@settings(max_examples=25)
@given(case=cases(), times=st.integers(2, 3))
def test_a_repeated_plan_merges_each_repetition_alike(name, case, times):
    changes, grid, x = case
    planned = plan(name, x, grid, settings_of(name, **changes))
    if planned is None:
        return
    values = tokens(times * len(x), grid)
    again = planned.repeated(times)
    parts = values.split(len(x))
    assert torch.equal(again.merge(values), torch.cat([planned.merge(part) for part in parts]))
    whole = again.unmerge(again.merge(values))
    assert torch.equal(whole, torch.cat([planned.unmerge(planned.merge(part)) for part in parts]))
    assert torch.equal(again.kept(), planned.kept().repeat(times, 1))
    assert torch.equal(again.labels(), planned.labels().repeat(times, 1))
    assert torch.equal(again.sizes, planned.sizes.repeat(times, 1))


@EVERY
@settings(max_examples=25)
@given(
    case=cases(),
    others=st.lists(st.tuples(st.just(1), st.integers(1, 7), st.integers(1, 7)), max_size=2),
    reference_ratio=st.none() | st.floats(0, 1),
)
def test_pictures_of_a_sequence_merge_each_by_its_own_plan(name, case, others, reference_ratio):
    """Merging the sequence merges every image by ``ratio`` or ``reference_ratio``, in any grid."""
    changes, grid, x = case
    if reference_ratio is not None:
        reference_ratio *= highest_ratio(changes["sx"], changes["sy"])
    config = settings_of(name, **changes, reference_ratio=reference_ratio)
    pictures = [x, *(tokens(len(x), other, seed=i) for i, other in enumerate(others))]
    ratios = [config.ratio, *[config.ratio if reference_ratio is None else reference_ratio] * len(others)]
    grids = [grid, *others]
    apart = [
        plan(name, own, its_grid, dataclasses.replace(config, ratio=ratio))
        for own, its_grid, ratio in zip(pictures, grids, ratios, strict=True)
    ]
    sequence = torch.cat(pictures, dim=1)
    extra = (sequence.double().sin().sum(dim=2).abs(),) if name in GUIDED_PLANNERS else ()
    whole = sequence_of(grids, config)
    assert whole.tokens == sequence.shape[1]
    assert (whole.removed > 0) == any(own is not None for own in apart)
    if not whole.removed:
        return
    joined = plan_pictures(PLANNERS[name], sequence, whole.pictures, torch.tensor(3), *extra)

    def each(change, dense):
        """The results for all images, one after another."""
        done = [
            dense(own) if its is None else change(its, own) for its, own in zip(apart, pictures, strict=True)
        ]
        return torch.cat(done, dim=1)

    # A soft plan pads its tiles to one size, which may change the order of its sums of at most 81 shares.
    # Merging and unmerging each then differ by up to 2 · 81 · 2⁻²⁴ of the terms, and these are below 8.
    rounding = 4 * 81 * 2**-24 if isinstance(joined, SoftPlan) else 0
    close = functools.partial(assert_close, rtol=rounding, atol=8 * rounding)
    merged = joined.merge(sequence)
    close(merged, each(lambda its, own: its.merge(own), lambda own: own))
    close(joined.unmerge(merged), each(lambda its, own: its.unmerge(its.merge(own)), lambda own: own))
    close(joined.sizes, each(lambda its, own: its.sizes, lambda own: torch.ones(own.shape[:2])))
    assert torch.equal(keep_destinations(joined, sequence), each(keep_destinations, lambda own: own))


@EVERY
@settings(max_examples=25)
@given(case=cases(), beside=st.integers(0, 5), seed=seeds)
def test_a_plan_within_a_sequence_merges_its_tokens_and_leaves_the_others(name, case, beside, seed):
    changes, grid, x = case
    planned = plan(name, x, grid, settings_of(name, **changes))
    if planned is None:
        return
    b, n, c = x.shape
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(beside + 1, (b,), generator=generator)
    others = torch.randn(b, beside, c, generator=generator)

    def sequence(inside):
        rows = zip(others, inside, start.tolist(), strict=True)
        return torch.stack([torch.cat([other[:at], row, other[at:]]) for other, row, at in rows])

    within = planned.within(start, beside + n)
    merged = within.merge(sequence(x))
    assert torch.equal(merged[:, :beside], others)
    # Sums of p products may have another order in a larger batch of tiles. Shares sum to 1 at most.
    p = planned.shares.shape[-1] if isinstance(planned, SoftPlan) else 0
    close = partial(assert_close, rtol=0, atol=2 * p * 2**-24 * max(1.0, x.abs().max().item()))
    close(merged[:, beside:], planned.merge(x))
    close(within.unmerge(merged), sequence(planned.unmerge(planned.merge(x))))
    assert torch.equal(within.kept()[:, beside:], planned.kept() + start[:, None])
    sizes = torch.cat([torch.ones(b, beside), planned.sizes], dim=1)
    assert torch.equal(within.sizes, sizes)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_merging_only_rounds_its_result(name, dtype):
    """Sums are exact enough in float32, so the error is that of rounding the mean once: half an ulp."""
    grid = (1, 16, 16)
    x = (tokens(2, grid) + 3).to(dtype)
    planned = plan(name, x, grid, settings_of(name))
    for function, values in ((planned.merge, x), (planned.unmerge, x[:, : planned.keep.shape[1]])):
        result, exact = function(values), function(values.double())
        assert result.dtype == dtype
        assert ((result.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps / 2 + 1e-5).all()


class Products(TorchDispatchMode):
    """Notes the dtypes of all that is multiplied as matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default):
            self.dtypes |= {value.dtype for value in args if isinstance(value, Tensor)}
        return function(*args, **(kwargs or {}))


@EVERY
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sides", [(64, 64), (33, 20)])
def test_an_accelerator_multiplies_no_tokens_of_half_precision_in_float32(name, dtype, sides):
    grid, config = (1, *sides), settings_of(name)
    features = torch.empty(2, math.prod(grid), 8, dtype=dtype, device="meta")
    step = torch.zeros((), dtype=torch.int64, device="meta")
    extra = (features.sum(dim=2),) if name in GUIDED_PLANNERS else ()
    with Products() as products:
        PLANNERS[name](features, grid, math.prod(grid) // 2, config.at_level(1), step, *extra)
    assert products.dtypes <= ({torch.float32} if dtype == torch.float32 else {torch.float16})
    compares = name not in COMPARES_NOTHING_BY_PRODUCTS
    assert bool(products.dtypes) is compares


@EVERY
def test_merging_and_unmerging_have_the_gradients_of_their_matrices(name):
    grid = (1, 4, 6)
    x = tokens(2, grid, 3).double().requires_grad_()
    planned = plan(name, x, grid, settings_of(name))
    assert torch.autograd.gradcheck(lambda t: planned.merge(t), x)
    assert torch.autograd.gradcheck(lambda t: planned.unmerge(planned.merge(t)), x)


@EVERY
def test_a_planner_removes_as_many_tokens_as_it_is_asked_to_whatever_the_ratio_says(name):
    grid = (3, 6, 6)
    x, config = tokens(2, grid), settings_of(name, ratio=0.75)
    extra = (x.double().sin().sum(dim=2).abs(),) if name in GUIDED_PLANNERS else ()
    planned = PLANNERS[name](x, grid, 24, config, torch.tensor(3), *extra)
    expected = {"uniform": 3 * 27, "windows": 3 * 6}.get(name, 24)  # 27 sources; two windows of three sources
    assert planned.inverse.shape[1] - planned.keep.shape[1] == expected


@EVERY
def test_nothing_is_drawn_from_the_global_generator_and_steps_differ(name):
    grid = (1, 12, 12)
    x, config = tokens(1, grid), settings_of(name)
    before = torch.random.get_rng_state()
    first, again = plan(name, x, grid, config), plan(name, x, grid, config)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first.labels(), again.labels())

    def differs(config: ToMeConfig, step: int) -> bool:
        return not torch.equal(plan(name, x, grid, config, step).kept(), first.kept())

    # Features near each other leave SiTo's choice to its noise, as smooth images do.
    x = torch.ones_like(x) + 1e-3 * x if name == "sito" else x
    first = plan(name, x, grid, config)
    assert differs(config, 4) == (name not in NOT_DRAWN)
    assert differs(dataclasses.replace(config, seed=1), 3) == (name not in NOT_DRAWN)
    first = plan(name, x, grid, dataclasses.replace(config, seed=None))
    assert not differs(dataclasses.replace(config, seed=None), 4)


@EVERY
def test_planning_compiles_into_one_graph(name):
    torch._dynamo.reset()
    grid, config = (2, 5, 7), settings_of(name, ratio=0.6)
    x = tokens(2, grid)

    def step(x: Tensor, importance: Tensor, at: Tensor) -> Tensor:
        extra = (importance,) if name in GUIDED_PLANNERS else ()
        planned = plan_by(name, x, grid, config, at, *extra)
        return planned.unmerge(planned.merge(x))

    arguments = x, x.sin().sum(dim=2).abs(), torch.tensor(3)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_close(compiled(*arguments), step(*arguments), rtol=1e-6, atol=1e-6)


@EVERY
def test_planning_needs_shapes_alone(name):
    """So operations can be counted without an image, and nothing waits for a device."""
    grid, config = (2, 5, 7), settings_of(name, ratio=0.6)
    x = tokens(2, grid)
    shapes = plan(name, x.to("meta"), grid, config)
    assert shapes.keep.shape == plan(name, x, grid, config).keep.shape
    assert shapes.unmerge(shapes.merge(x.to("meta"))).shape == x.shape
