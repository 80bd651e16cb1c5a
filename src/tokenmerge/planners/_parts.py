"""Plans for a sequence that is split between devices: each plans for the part that it has."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tokenmerge.config import MergeSettings
from tokenmerge.planners._grid import num_removed, split
from tokenmerge.planners._pictures import Pictures

GridShape = tuple[int, int, int]


def part_bounds(n: int, index: int, parts: int) -> tuple[int, int]:
    """Where a part of n tokens begins and ends; as ``torch.tensor_split``, the first ones are longer by one.

    >>> [part_bounds(7, index, 3) for index in range(3)]
    [(0, 3), (3, 5), (5, 7)]
    """
    each, longer = divmod(n, parts)
    return index * each + min(index, longer), (index + 1) * each + min(index + 1, longer)


def pictures_of_part(pictures: Pictures, index: int, parts: int) -> Pictures:
    """The grids in one of several equally long parts of a sequence, with the settings of each.

    Tokens keep their order, so a part of a picture is some whole rows of it, with pieces of rows before and
    behind them; a part of a video is some whole frames, with pieces of frames. Each piece has a grid of its
    own. As all devices must go on with the same number of tokens, every part loses as many as that which can
    lose the fewest; there, the ratios are those of ``pictures``.

    ``min_tokens`` compares whole pictures.

    >>> pictures = [((1, 4, 8), MergeSettings(ratio=0.5))]
    >>> [(grid, settings.ratio) for grid, settings in pictures_of_part(pictures, 1, 2)]
    [((1, 2, 8), 0.5)]
    """
    every = [_pieces(pictures, one, parts) for one in range(parts)]
    return _removing(every[index], min(_removed(pieces) for pieces in every))


def _pieces(pictures: Pictures, index: int, parts: int) -> Pictures:
    start, stop = part_bounds(sum(math.prod(grid) for grid, _ in pictures), index, parts)
    pieces: list[tuple[GridShape, MergeSettings]] = []
    before = 0
    for grid, settings in pictures:
        n = math.prod(grid)
        merges = num_removed(grid, settings) > 0
        own = dataclasses.replace(settings, min_tokens=0) if merges else _with_ratio(settings, 0)
        within = max(0, start - before), min(n, stop - before)
        pieces += [((f, h, w), own) for f, h, w in _cut(grid, *within)]
        before += n
    return pieces


def _cut(sides: Sequence[int], start: int, stop: int) -> list[tuple[int, ...]]:
    """The grids of the tokens ``start`` to ``stop`` of a grid, in their order."""
    if start >= stop:
        return []
    if len(sides) == 1:
        return [(stop - start,)]
    inner = math.prod(sides[1:])
    first, last = -(-start // inner), stop // inner  # what lies between is whole
    if first > last:
        ends = _cut(sides[1:], start - last * inner, stop - last * inner)
        return [(1, *end) for end in ends]
    head = _cut(sides[1:], start - (first - 1) * inner, inner) if start % inner else []
    whole = [(last - first, *sides[1:])] if first < last else []
    return [*((1, *end) for end in head), *whole, *((1, *end) for end in _cut(sides[1:], 0, stop % inner))]


def _removed(pieces: Pictures) -> int:
    return sum(num_removed(grid, settings) for grid, settings in pieces)


def _removing(pieces: Pictures, wanted: int) -> Pictures:
    """The pieces with ratios that remove no more than ``wanted`` tokens from all of them, in proportion."""
    total = _removed(pieces)
    if total == wanted:
        return pieces
    fewer: list[tuple[GridShape, MergeSettings]] = []
    end = done = 0
    for grid, settings in pieces:
        end += num_removed(grid, settings)
        own = end * wanted // total - done
        done += own
        frames, part = split(grid, settings)
        n = math.prod(part)
        each, more = divmod(own, frames)
        fewer += [
            # A ratio is rounded down to whole tokens.
            ((grid[0] * count // frames, *grid[1:]), _with_ratio(settings, (r + 0.5) / n if r else 0))
            for count, r in ((more, each + 1), (frames - more, each))
            if count
        ]
    return fewer


def _with_ratio(settings: MergeSettings, ratio: float) -> MergeSettings:
    return dataclasses.replace(settings, ratio=ratio, reference_ratio=None)
