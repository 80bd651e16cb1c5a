"""Plans for the part of a sequence that one of several devices has."""

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from tokenmerge.config import MergeSettings
from tokenmerge.planners.sequences import num_removed, part_bounds, sequence_of, sequence_of_part

SIDES = st.integers(1, 9)
GRIDS = st.lists(st.tuples(st.integers(1, 5), SIDES, SIDES), min_size=1, max_size=3)
PARTS = st.integers(1, 6)
RATIO = st.floats(0, 0.75)
CONFIG = st.builds(MergeSettings, ratio=RATIO, reference_ratio=RATIO, st=st.sampled_from([1, 2]))


def places_in(grid):
    """``[n, 3]``: frame, row and column of each token."""
    return torch.cartesian_prod(*map(torch.arange, grid)).view(-1, 3)


def pieces(grids, config, parts):
    """The images in each part."""
    pictures = sequence_of(grids, config).pictures
    return [sequence_of_part(pictures, index, parts).pictures for index in range(parts)]


def num_removed_in_all(pictures):
    return sum(picture.r for picture in pictures)


@given(GRIDS, CONFIG, PARTS)
def test_the_parts_are_those_of_tensor_split_and_their_grids_hold_neighbours(grids, config, parts):
    """Along each axis of a grid, places count up by one from its first token."""
    places = torch.cat([F.pad(places_in(grid), (1, 0), value=i) for i, grid in enumerate(grids)])
    for part, own in zip(places.tensor_split(parts), pieces(grids, config, parts), strict=True):
        assert sum(math.prod(grid) for grid, *_ in own) == len(part)
        lengths = [math.prod(grid) for grid, *_ in own]
        for (grid, *_), tokens in zip(own, part.split(lengths), strict=True):
            picture, *within = (tokens - tokens[:1]).T
            assert not picture.any()
            assert torch.equal(torch.stack(within, 1), places_in(grid))


@given(GRIDS, CONFIG, PARTS)
def test_every_part_loses_as_many_tokens_and_no_piece_more_than_its_ratio(grids, config, parts):
    every = pieces(grids, config, parts)
    removed = [num_removed_in_all(own) for own in every]
    assert len(set(removed)) == 1
    for own in every:
        for grid, settings, r in own:
            assert r <= num_removed(grid, settings)
            assert r % (grid[0] if settings.st == 1 else 1) == 0  # equally many from each frame


@given(st.tuples(st.integers(2, 9), SIDES), RATIO, PARTS)
def test_equal_parts_lose_what_the_ratio_says(side, ratio, parts):
    """Parts of whole rows are alike, so none has to lose less than its own ratio."""
    rows, columns = side
    grid, config = (1, rows * parts, columns), MergeSettings(ratio=ratio)
    for own in pieces([grid], config, parts):
        assert [piece for piece, *_ in own] == [(1, rows, columns)]
        assert num_removed_in_all(own) == num_removed((1, rows, columns), config)


@given(GRIDS, PARTS)
def test_the_fewest_tokens_of_a_grid_that_merges_count_in_the_whole_picture(grids, parts):
    """If no image is below the limit, it changes nothing. If all are below it, all stay dense."""
    config = MergeSettings(ratio=0.5)
    sizes = [math.prod(grid) for grid in grids]
    low, high = (MergeSettings(ratio=0.5, min_tokens=n) for n in (min(sizes), max(sizes) + 1))
    removed = [[num_removed_in_all(own) for own in pieces(grids, one, parts)] for one in (config, low, high)]
    assert removed[0] == removed[1]
    assert not any(removed[2])


@given(st.integers(0, 50), PARTS)
def test_bounds(n, parts):
    expected = [len(part) for part in torch.arange(n).tensor_split(parts)]
    bounds = [part_bounds(n, index, parts) for index in range(parts)]
    assert [stop - start for start, stop in bounds] == expected
    assert bounds[0][0] == 0
    assert all(one[1] == other[0] for one, other in itertools.pairwise(bounds))
