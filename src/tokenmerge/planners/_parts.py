"""Plans for a sequence that is split between devices: each plans for the part that it has."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch

from tokenmerge.config import MergeSettings
from tokenmerge.planners._grid import GridShape, Pictures, TokenSequence, num_removed, split


def part_bounds(n: int, index: int, parts: int) -> tuple[int, int]:
    """Where a part of n tokens begins and ends. As in ``torch.tensor_split``, the first may be longer by 1.

    >>> [part_bounds(7, index, 3) for index in range(3)]
    [(0, 3), (3, 5), (5, 7)]
    """
    each, longer = divmod(n, parts)
    return index * each + min(index, longer), (index + 1) * each + min(index + 1, longer)


def sequence_of_part(pictures: Pictures, index: int, parts: int) -> TokenSequence:
    """One of several equally long parts of a sequence: the grids in it, with the settings of each.

    Tokens keep their order. So a part of a picture has some whole rows, with pieces of rows before and after
    them, and a part of a video has some whole frames, with pieces of frames. Each piece has its own grid. All
    devices must go on with the same number of tokens, so every part loses as many as the part that can lose
    the fewest. In that part the ratios are those of ``pictures``.

    ``min_tokens`` is compared with whole pictures.

    >>> sequence = sequence_of_part([((1, 4, 8), MergeSettings(ratio=0.5))], 1, 2)
    >>> [(grid, settings.ratio) for grid, settings in sequence.pictures]
    [((1, 2, 8), 0.5)]
    """
    # Cached as in sequence_of, but not in a graph.
    if torch.compiler.is_compiling():
        return _sequence_of_part(tuple(pictures), index, parts)
    return _remembered(tuple(pictures), index, parts)


def _sequence_of_part(pictures: Pictures, index: int, parts: int) -> TokenSequence:
    every = [TokenSequence.of(_pieces(pictures, one, parts)) for one in range(parts)]
    return TokenSequence.of(_removing(every[index], min(one.removed for one in every)))


_remembered = functools.lru_cache(maxsize=1024)(_sequence_of_part)


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
    """The grids of the pieces that hold tokens ``start`` to ``stop`` of a grid, in their order."""
    if start >= stop:
        return []
    if len(sides) == 1:
        return [(stop - start,)]
    inner = math.prod(sides[1:])
    first, last = -(-start // inner), stop // inner  # those between them are whole
    if first > last:
        ends = _cut(sides[1:], start - last * inner, stop - last * inner)
        return [(1, *end) for end in ends]
    head = _cut(sides[1:], start - (first - 1) * inner, inner) if start % inner else []
    whole = [(last - first, *sides[1:])] if first < last else []
    return [*((1, *end) for end in head), *whole, *((1, *end) for end in _cut(sides[1:], 0, stop % inner))]


def _removing(pieces: TokenSequence, wanted: int) -> Pictures:
    """The pieces with ratios that remove no more than ``wanted`` tokens from all of them, in proportion."""
    if pieces.removed == wanted:
        return pieces.pictures
    fewer: list[tuple[GridShape, MergeSettings]] = []
    end = done = 0
    for grid, settings in pieces.pictures:
        end += num_removed(grid, settings)
        own = end * wanted // pieces.removed - done
        done += own
        frames, part = split(grid, settings)
        n = math.prod(part)
        each, more = divmod(own, frames)
        fewer += [
            # Half a token more, since num_removed rounds down.
            ((grid[0] * count // frames, *grid[1:]), _with_ratio(settings, (r + 0.5) / n if r else 0))
            for count, r in ((more, each + 1), (frames - more, each))
            if count
        ]
    return fewer


def _with_ratio(settings: MergeSettings, ratio: float) -> MergeSettings:
    return dataclasses.replace(settings, ratio=ratio, reference_ratio=None)
