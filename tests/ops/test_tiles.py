"""Tiled matching against a search with loops, and against global matching."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from tokenmerge.ops import bipartite_soft_matching, own_cell, strided_partition, tiled_matching


@st.composite
def grids(draw):
    cell = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return (draw(st.integers(cell[0], 13)), draw(st.integers(cell[1], 13))), cell


@given(grids(), st.sampled_from([2, 4]), st.integers(0, 2**40))
def test_each_source_finds_the_most_similar_destination_of_its_tile(case, side, seed):
    grid, cell = case
    src, dst = strided_partition(grid, cell, draw=(seed, torch.tensor(seed)))
    x = torch.randn(2, grid[0] * grid[1], 6, generator=torch.Generator().manual_seed(seed))
    order, nearest = tiled_matching(x, grid, cell, src, dst, side)
    unit = torch.nn.functional.normalize(x, dim=-1)
    rows, columns = grid[0] // cell[0], grid[1] // cell[1]
    inside = len(dst) * (cell[0] * cell[1] - 1)
    for image in range(2):
        found = []
        for i, token in enumerate(src.tolist()):
            home = own_cell(grid, cell, torch.tensor([token])).item()
            if i < inside:
                row, column = (place // side * side for place in divmod(home, columns))
                candidates = [
                    y * columns + z
                    for y in range(max(0, row - side // 2), min(rows, row + side + side // 2))
                    for z in range(max(0, column - side // 2), min(columns, column + side + side // 2))
                ]
            else:
                candidates = [home]
            similarity = unit[image, dst[candidates]] @ unit[image, token]
            assert nearest[image, i].item() in candidates
            chosen = (unit[image, dst[nearest[image, i]]] @ unit[image, token]).item()
            assert_close(chosen, similarity.max().item(), rtol=0, atol=1e-5)
            found.append(chosen)
        assert (torch.tensor(found)[order[image]].diff() <= 1e-5).all()
        assert sorted(order[image].tolist()) == list(range(len(src)))


@pytest.mark.parametrize("grid", [(32, 32), (24, 16)])
def test_one_tile_is_global_matching(grid):
    src, dst = strided_partition(grid, (2, 2), draw=(0, torch.tensor(1)))
    x = torch.randn(2, grid[0] * grid[1], 8)
    order, nearest = tiled_matching(x, grid, (2, 2), src, dst, side=16)
    expected_order, expected = bipartite_soft_matching(x, src, dst)
    assert torch.equal(nearest, expected)
    assert torch.equal(order, expected_order)
