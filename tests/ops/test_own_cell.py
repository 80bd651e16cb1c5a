"""The cells of tokens, and the planner that merges each cell."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planned import plan_by
from torch.testing import assert_close

from tokenmerge.config import ToMeConfig
from tokenmerge.errors import ConfigError
from tokenmerge.ops.matching import own_cell

strides = st.integers(1, 3)


@st.composite
def grids(draw):
    cell = draw(strides), draw(strides)
    return (draw(st.integers(cell[0], 9)), draw(st.integers(cell[1], 9))), cell


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
    plan = plan_by("uniform", x, (frames, height, width), config, torch.tensor(0))
    if plan is None:
        assert config.ratio == 0 or int(height * width * config.ratio) == 0
        return
    cells = own_cell((height, width), (sy, sx), torch.arange(height * width))
    merged = plan.merge(x).view(b, frames, -1, 4)
    for cell in range(int(cells.max()) + 1):
        mean = x.view(b, frames, -1, 4)[:, :, cells == cell].mean(2)
        assert_close(merged[:, :, cell], mean, rtol=1e-5, atol=1e-6)


def test_planners_that_stay_within_a_frame():
    for planner in ("sito", "uniform"):
        with pytest.raises(ConfigError, match="stays within a frame, and st=2 reaches over time"):
            ToMeConfig(planner=planner, st=2)
