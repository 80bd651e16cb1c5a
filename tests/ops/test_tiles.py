"""Matching in tiles, of images and over time."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import plan_by
from torch import Tensor
from torch.testing import assert_close

from tokenmerge import ToMeConfig
from tokenmerge.config.settings import OVER_TIME
from tokenmerge.ops.matching import bipartite_soft_matching, own_cell
from tokenmerge.ops.partition import strided_partition
from tokenmerge.ops.tiles import tiled_matching
from tokenmerge.planners import PLANNERS
from tokenmerge.planners.sequences import num_removed

seeds = st.integers(0, 2**40)


@st.composite
def grids(draw):
    cell = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return (draw(st.integers(cell[0], 13)), draw(st.integers(cell[1], 13))), cell


@st.composite
def videos(draw):
    cell = tuple(draw(st.integers(1, 3)) for _ in range(3))
    longest = (7, 7, 7)
    return tuple(draw(st.integers(*pair)) for pair in zip(cell, longest, strict=True)), cell


def random_tokens(b: int, grid: tuple[int, ...], seed: int, c: int = 6) -> Tensor:
    return torch.randn(b, math.prod(grid), c, generator=torch.Generator().manual_seed(seed))


def place(cell: int, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Where a cell is along each axis."""
    found = []
    for count in reversed(counts):
        cell, here = divmod(cell, count)
        found.insert(0, here)
    return tuple(found)


def candidates_of(
    token: int, is_outside: bool, grid: tuple[int, ...], cell: tuple[int, ...], sides: tuple[int, ...]
) -> list[int]:
    """The cells whose destinations a source is compared with, straight from the definition."""
    counts = tuple(g // c for g, c in zip(grid, cell, strict=True))
    home = place(own_cell(grid, cell, torch.tensor([token])).item(), counts)
    in_late_frame = len(grid) == 3 and place(token, grid)[0] >= counts[0] * cell[0]
    if is_outside and not in_late_frame:
        reach = [(at, at + 1) for at in home]
    else:
        reach = []
        for at, side, count in zip(home, sides, counts, strict=True):
            boxes = -(-count // side)  # of about the same length
            number = max(i for i in range(boxes) if i * count // boxes <= at)
            start, end = number * count // boxes, (number + 1) * count // boxes
            reach.append((max(0, start - side // 2), min(count, end + side // 2)))
    return [
        sum(at * math.prod(counts[axis + 1 :]) for axis, at in enumerate(one))
        for one in itertools.product(*(range(*ends) for ends in reach))
    ]


def check_against_the_definition(grid, cell, sides, seed):
    src, dst = strided_partition(grid, cell, draw=(seed, torch.tensor(seed)))
    x = random_tokens(2, grid, seed)
    order, nearest = tiled_matching(x, grid, cell, src, dst, sides)
    unit = torch.nn.functional.normalize(x, dim=-1)
    inside = len(dst) * (math.prod(cell) - 1)
    for image in range(2):
        found = []
        for i, token in enumerate(src.tolist()):
            candidates = candidates_of(token, i >= inside, grid, cell, sides)
            similarity = unit[image, dst[candidates]] @ unit[image, token]
            assert nearest[image, i].item() in candidates
            chosen = (unit[image, dst[nearest[image, i]]] @ unit[image, token]).item()
            assert_close(chosen, similarity.max().item(), rtol=0, atol=1e-5)
            found.append(chosen)
        assert (torch.tensor(found)[order[image]].diff() <= 1e-5).all()
        assert sorted(order[image].tolist()) == list(range(len(src)))


@given(grids(), st.sampled_from([2, 4]), seeds)
def test_each_source_finds_the_most_similar_destination_of_its_tile(case, side, seed):
    check_against_the_definition(*case, (side, side), seed)


@settings(max_examples=25)
@given(videos(), st.sampled_from([(2, 2, 2), (2, 4, 2)]), seeds)
def test_it_also_does_over_time_and_in_left_over_frames(case, sides, seed):
    check_against_the_definition(*case, sides, seed)


@given(videos(), seeds)
def test_own_cells_are_those_that_hold_the_tokens_or_the_nearest(case, seed):
    grid, cell = case
    counts = tuple(g // c for g, c in zip(grid, cell, strict=True))
    tokens = torch.arange(math.prod(grid))
    for token, own in enumerate(own_cell(grid, cell, tokens).tolist()):
        expected = [
            min(at // stride, count - 1)
            for at, stride, count in zip(place(token, grid), cell, counts, strict=True)
        ]
        assert list(place(own, counts)) == expected


@pytest.mark.parametrize("grid", [(32, 32), (24, 16)])
def test_one_tile_is_global_matching(grid):
    src, dst = strided_partition(grid, (2, 2), draw=(0, torch.tensor(1)))
    x = torch.randn(2, grid[0] * grid[1], 8)
    order, nearest = tiled_matching(x, grid, (2, 2), src, dst, sides=(16, 16))
    expected_order, expected = bipartite_soft_matching(x, src, dst)
    assert torch.equal(nearest, expected)
    assert torch.equal(order, expected_order)


@pytest.mark.parametrize("grid", [(4, 16, 16), (5, 16, 16), (3, 8, 12), (2, 4, 4)])
def test_a_video_in_one_tile_merges_as_with_tome_whatever_the_number_of_frames(grid):
    x = random_tokens(2, grid, seed=1, c=8)
    plans = [
        plan_by(name, x, grid, ToMeConfig(ratio=0.6, st=2, planner=name), torch.tensor(5))
        for name in ("tiled", "tome")
    ]
    for mine, theirs in zip(*plans, strict=True):
        assert mine is theirs is None or torch.equal(mine, theirs)


@pytest.mark.parametrize("planner", OVER_TIME)
@pytest.mark.parametrize(
    ("grid", "time"), [((5, 12, 10), 2), ((7, 6, 7), 4), ((9, 40, 36), 2), ((3, 8, 8), 3)]
)
def test_planners_that_reach_over_time_remove_what_the_ratio_says_and_do_so_over_time(planner, grid, time):
    config = ToMeConfig(ratio=0.7, st=time, planner=planner)
    plan = plan_by(planner, random_tokens(2, grid, seed=3), grid, config, torch.tensor(2))
    n, removed = math.prod(grid), num_removed(grid, config)
    assert removed == int(0.7 * n)
    assert plan.keep.shape == (2, n - removed)
    frame = torch.arange(grid[0]).repeat_interleave(grid[1] * grid[2]).expand(2, -1)
    assert (frame.gather(1, plan.kept()).gather(1, plan.labels()) != frame).any()


def test_a_source_merges_within_the_window_of_its_tile():
    """A window is 4 cells long, 1 before and after a tile: with st=2 a token moves at most 7 frames."""
    grid = 24, 48, 8
    config = ToMeConfig(ratio=0.8, st=2, planner="tiled")
    plan = plan_by("tiled", random_tokens(1, grid, seed=4), grid, config, torch.tensor(0))
    kept = plan.kept()[0][plan.labels()[0]]
    token = torch.arange(math.prod(grid))
    for axis, side in enumerate((2, 8, 8)):
        stride = 2
        below = math.prod(grid[axis + 1 :])
        tile = [at // below % grid[axis] // stride // side for at in (token, kept)]
        # The window reaches half a tile into the tiles beside it.
        assert (tile[0] - tile[1]).abs().max() <= 1
    far = (kept // (48 * 8) - token // (48 * 8)).abs().max().item()
    assert 1 < far <= 7


def test_products_grow_with_the_frames_and_not_with_their_square():
    from torch.utils.flop_counter import FlopCounterMode

    def operations(planner: str, frames: int) -> int:
        grid = frames, 32, 32
        x = random_tokens(1, grid, seed=0, c=4)
        with FlopCounterMode(display=False) as counter:
            plan_by(planner, x, grid, ToMeConfig(ratio=0.5, st=2, planner=planner), torch.tensor(0))
        return counter.get_total_flops()

    assert operations("tome", 32) == 4 * operations("tome", 16)
    # At either end of the video, windows are cut off.
    assert operations("tiled", 32) < 2.2 * operations("tiled", 16)
    assert operations("tiled", 64) - operations("tiled", 32) == 2 * (
        operations("tiled", 32) - operations("tiled", 16)
    )


def test_others_stay_within_a_frame():
    for planner in set(PLANNERS) - set(OVER_TIME):
        message = "st=2 reaches over time; take planner='tiled' or planner='tome', or st=1"
        with pytest.raises(ValueError, match=message):
            ToMeConfig(planner=planner, st=2)
