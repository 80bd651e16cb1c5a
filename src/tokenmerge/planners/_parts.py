"""Plans for a sequence that is split between devices: each plans for the part that it has."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import torch

from tokenmerge.planners._grid import Picture, TokenSequence, num_removed, split


def part_bounds(n: int, index: int, parts: int) -> tuple[int, int]:
    """Return where a part of n tokens starts and ends, as in ``torch.tensor_split``: the first may be longer.

    >>> [part_bounds(7, index, 3) for index in range(3)]
    [(0, 3), (3, 5), (5, 7)]
    """
    each, longer = divmod(n, parts)
    return index * each + min(index, longer), (index + 1) * each + min(index + 1, longer)


def sequence_of_part(pictures: Sequence[Picture], index: int, parts: int) -> TokenSequence:
    """Return one of several equally long parts of a sequence.

    Tokens keep their order. So a part of a picture has some whole rows, with pieces of rows before and after
    them, and a part of a video has some whole frames, with pieces of frames. Each piece has its own grid. All
    devices must continue with the same number of tokens, so every part loses as many as the part that can
    lose the fewest. ``min_tokens`` is compared with whole pictures.

    >>> from tokenmerge.config import MergeSettings
    >>> sequence = sequence_of_part([Picture((1, 4, 8), MergeSettings(ratio=0.5), 16)], 1, 2)
    >>> [(grid, r) for grid, _, r in sequence.pictures]
    [((1, 2, 8), 8)]
    """
    # Cached as in sequence_of, but not in a graph.
    if torch.compiler.is_compiling():
        return _sequence_of_part(tuple(pictures), index, parts)
    return _remembered(tuple(pictures), index, parts)


def _sequence_of_part(pictures: Sequence[Picture], index: int, parts: int) -> TokenSequence:
    every = [TokenSequence.of(_pieces(pictures, one, parts)) for one in range(parts)]
    return TokenSequence.of(_removing(every[index], min(one.removed for one in every)))


_remembered = functools.lru_cache(maxsize=1024)(_sequence_of_part)


def _pieces(pictures: Sequence[Picture], index: int, parts: int) -> Iterator[Picture]:
    start, stop = part_bounds(sum(math.prod(picture.grid) for picture in pictures), index, parts)
    before = 0
    for grid, settings, removed in pictures:
        n = math.prod(grid)
        anywhere = dataclasses.replace(settings, min_tokens=0)
        for f, h, w in _cut(grid, max(0, start - before), min(n, stop - before)):
            yield Picture((f, h, w), settings, num_removed((f, h, w), anywhere) if removed else 0)
        before += n


def _cut(sides: Sequence[int], start: int, stop: int) -> list[tuple[int, ...]]:
    """Return the grids of the pieces that hold tokens ``start`` to ``stop`` of a grid, in their order."""
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


def _removing(pieces: TokenSequence, wanted: int) -> Iterator[Picture]:
    """Yield the pieces so that they lose ``wanted`` tokens together, in proportion.

    Frames of one piece that lose different numbers of tokens become two pieces.
    """
    removed = pieces.removed
    end = done = 0
    for grid, settings, r in pieces.pictures:
        end += r
        own = end * wanted // removed - done if removed else 0
        done += own
        frames, _ = split(grid, settings)
        each, more = divmod(own, frames)
        for count, r_of_frame in ((more, each + 1), (frames - more, each)):
            if count:
                yield Picture((grid[0] * count // frames, *grid[1:]), settings, count * r_of_frame)
