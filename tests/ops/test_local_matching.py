"""Local matching against a search with loops, and the cells of tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from tokenmerge.config import ToMeConfig
from tokenmerge.errors import ConfigError
from tokenmerge.ops import local_matching, merge, own_cell, strided_partition
from tokenmerge.planners import PLANNERS

strides = st.integers(1, 3)


@st.composite
def grids(draw):
    cell = draw(strides), draw(strides)
    return (draw(st.integers(cell[0], 9)), draw(st.integers(cell[1], 9))), cell


@given(grids(), st.integers(1, 3), st.integers(0, 2**40))
def test_each_source_finds_the_most_similar_destination_of_the_cells_around_it(case, b, seed):
    grid, cell = case
    src, dst = strided_partition(grid, cell, draw=(seed, torch.tensor(seed)))
    x = torch.randn(b, grid[0] * grid[1], 6, generator=torch.Generator().manual_seed(seed))
    order, nearest = local_matching(x, grid, cell, src, dst)
    unit = torch.nn.functional.normalize(x, dim=-1)
    rows, columns = grid[0] // cell[0], grid[1] // cell[1]
    for image in range(b):
        found = []
        for i, token in enumerate(src.tolist()):
            row, column = divmod(own_cell(grid, cell, torch.tensor([token])).item(), columns)
            around = [
                y * columns + z
                for y in range(max(0, row - 1), min(rows, row + 2))
                for z in range(max(0, column - 1), min(columns, column + 2))
            ]
            similarity = unit[image, dst[around]] @ unit[image, token]
            assert nearest[image, i].item() in around
            chosen = (unit[image, dst[nearest[image, i]]] @ unit[image, token]).item()
            assert_close(chosen, similarity.max().item(), rtol=0, atol=1e-5)
            found.append(chosen)
        ordered = torch.tensor(found)[order[image]]
        assert (ordered.diff() <= 1e-5).all()
        assert sorted(order[image].tolist()) == list(range(len(src)))


@given(grids())
def test_a_token_lies_in_its_cell_or_beyond_the_last_one(case):
    (height, width), cell = case
    cells = own_cell((height, width), cell, torch.arange(height * width)).view(height, width)
    columns = width // cell[1]
    for y in range(height):
        for x in range(width):
            row, column = min(y // cell[0], height // cell[0] - 1), min(x // cell[1], columns - 1)
            assert cells[y, x] == row * columns + column


@given(grids(), st.integers(1, 2), st.integers(1, 3))
def test_the_uniform_planner_means_each_cell(case, b, frames):
    (height, width), (sy, sx) = case
    config = ToMeConfig(ratio=1 - 1 / (sx * sy), sx=sx, sy=sy, planner="uniform", seed=None)
    x = torch.randn(b, frames * height * width, 4)
    plan = PLANNERS["uniform"](x, (frames, height, width), config, torch.tensor(0))
    if plan is None:
        assert config.ratio == 0 or int(height * width * config.ratio) == 0
        return
    cells = own_cell((height, width), (sy, sx), torch.arange(height * width))
    merged = merge(plan, x).view(b, frames, -1, 4)
    for cell in range(int(cells.max()) + 1):
        mean = x.view(b, frames, -1, 4)[:, :, cells == cell].mean(2)
        assert_close(merged[:, :, cell], mean, rtol=1e-5, atol=1e-6)


def test_planners_that_stay_within_a_frame():
    for planner in ("local", "uniform"):
        with pytest.raises(ConfigError, match="stays within a frame, and st=2 reaches over time"):
            ToMeConfig(planner=planner, st=2)
