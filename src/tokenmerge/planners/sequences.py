"""What all planners share: the steps from the settings and token grids of a sequence to its plan.

The settings say how many tokens one grid loses and which parts it has. Where a sequence is split between
devices, each plans for the part that it has. A sequence of images is then planned image by image; a
planner plans one part of a grid at a time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenmerge.config import MergeSettings
from tokenmerge.ops.once import Device, once
from tokenmerge.ops.partition import Sides, num_destinations, num_tokens, strided_partition
from tokenmerge.ops.plan import Plan, join_plans

# A planner of whole grids. It takes (features [b, n, c], grid, r, settings, step), and importance [b, n] last
# if it looks at that.
Planner = Callable[..., Plan]


def num_removed(grid: Sequence[int], settings: MergeSettings) -> int:
    """Return the number of tokens that the ratio removes from a grid of (frames, rows, columns).

    It is ratio · n, rounded down for each part that merges on its own, and 0 for a grid of fewer than
    ``min_tokens`` tokens, or without a whole cell.

    >>> num_removed((1, 64, 64), MergeSettings(ratio=0.5)), num_removed((1, 1, 9), MergeSettings(ratio=0.5))
    (2048, 0)
    """
    parts, part = split(grid, settings)
    if num_tokens(grid) < settings.min_tokens or not num_destinations(part, cell_of(part, settings)):
        return 0
    return parts * settings.removed_of(num_tokens(part))


def split(grid: Sequence[int], settings: MergeSettings) -> tuple[int, Sides]:
    """Return how many parts of a grid merge on their own, and the grid of one part.

    The parts are the frames, (rows, columns) each, or the whole grid where cells have several frames
    (``st`` > 1).
    """
    if settings.st == 1:
        return grid[0], tuple(grid[1:])
    return 1, tuple(grid)


def cell_of(part: Sequence[int], settings: MergeSettings) -> Sides:
    """Return the size of the cells of a part in tokens, with the same axes as the grid of the part."""
    return (settings.st, settings.sy, settings.sx)[-len(part) :]


class Picture(NamedTuple):
    """An image in a sequence of tokens."""

    grid: tuple[int, int, int]  # frames, rows and columns
    settings: MergeSettings
    r: int  # number of tokens to remove, equally many from each of the parts that merge on their own


class TokenSequence(NamedTuple):
    """The sequence of tokens that a block gets."""

    pictures: tuple[Picture, ...]  # in the order of their tokens
    tokens: int  # in all of them
    removed: int  # from all of them

    @classmethod
    def of(cls, images: Iterable[Picture]) -> TokenSequence:
        """Return the sequence of these images."""
        images = tuple(images)
        tokens = sum(num_tokens(image.grid) for image in images)
        return cls(images, tokens, sum(image.r for image in images))


def _remembered(make: Callable[..., TokenSequence]) -> Callable[..., TokenSequence]:
    """Cache a function of a sequence and of numbers, since every block asks for its results."""
    known = functools.lru_cache(maxsize=1024)(make)

    @functools.wraps(make)
    def get(sequence: Sequence[Any], *others: Any) -> TokenSequence:
        # torch.compile warns about cached functions, and the sides of a grid may be symbolic in its graphs.
        return (make if torch.compiler.is_compiling() else known)(tuple(sequence), *others)

    return get


@_remembered
def sequence_of(grids: Sequence[tuple[int, int, int]], settings: MergeSettings) -> TokenSequence:
    """Return the sequence of images with these grids of (frames, rows, columns).

    The first image is being made with these settings; ``reference_ratio`` is the ratio of all others.

    >>> [image.r for image in sequence_of(((1, 4, 4), (1, 2, 4)), MergeSettings(ratio=0.5)).pictures]
    [8, 4]
    """
    ratio = settings.ratio if settings.reference_ratio is None else settings.reference_ratio
    of_references = dataclasses.replace(settings, ratio=ratio)
    images = []
    for place, grid in enumerate(grids):
        of_image = settings if place == 0 else of_references
        images.append(Picture(grid, of_image, num_removed(grid, of_image)))
    return TokenSequence.of(images)


def part_bounds(n: int, index: int, parts: int) -> tuple[int, int]:
    """Return where a part of n tokens starts and ends, as in ``torch.tensor_split``: the first may be longer.

    >>> [part_bounds(7, index, 3) for index in range(3)]
    [(0, 3), (3, 5), (5, 7)]
    """
    each, longer = divmod(n, parts)
    return index * each + min(index, longer), (index + 1) * each + min(index + 1, longer)


@_remembered
def sequence_of_part(images: Sequence[Picture], index: int, parts: int) -> TokenSequence:
    """Return one of several equally long parts of a sequence.

    Tokens keep their order, so a part of an image has some whole rows, with pieces of rows before and after
    them, and a part of a video whole frames, with pieces of frames. Each piece has its own grid. Every part
    loses as many tokens as the part that can lose the fewest, so that all devices continue with equally many.
    ``min_tokens`` is compared with whole images.

    >>> sequence = sequence_of_part([Picture((1, 4, 8), MergeSettings(ratio=0.5), 16)], 1, 2)
    >>> [(grid, r) for grid, _, r in sequence.pictures]
    [((1, 2, 8), 8)]
    """
    every = [TokenSequence.of(_pieces(images, one, parts)) for one in range(parts)]
    return TokenSequence.of(_removing(every[index], min(one.removed for one in every)))


def _pieces(images: Sequence[Picture], index: int, parts: int) -> Iterator[Picture]:
    start, stop = part_bounds(sum(num_tokens(image.grid) for image in images), index, parts)
    before = 0
    for grid, settings, removed in images:
        n = num_tokens(grid)
        anywhere = dataclasses.replace(settings, min_tokens=0)
        for f, h, w in _cut(grid, max(0, start - before), min(n, stop - before)):
            yield Picture((f, h, w), settings, num_removed((f, h, w), anywhere) if removed else 0)
        before += n


def _cut(sides: Sequence[int], start: int, stop: int) -> list[Sides]:
    """Return the grids of the pieces that hold tokens ``start`` to ``stop`` of a grid, in their order."""
    if start >= stop:
        return []
    if len(sides) == 1:
        return [(stop - start,)]
    inner = num_tokens(sides[1:])
    # The parts from ``first`` to before ``last`` are whole.
    first = -(-start // inner)
    last = stop // inner
    if first > last:
        return [(1, *end) for end in _cut(sides[1:], start - last * inner, stop - last * inner)]
    pieces: list[Sides] = []
    if start % inner:
        pieces += [(1, *end) for end in _cut(sides[1:], start - (first - 1) * inner, inner)]
    if first < last:
        pieces.append((last - first, *sides[1:]))
    pieces += [(1, *end) for end in _cut(sides[1:], 0, stop % inner)]
    return pieces


def _removing(pieces: TokenSequence, wanted: int) -> Iterator[Picture]:
    """Yield the pieces so that they lose ``wanted`` tokens together, in proportion.

    Frames of one piece that lose different numbers of tokens become two pieces.
    """
    removed = pieces.removed
    end = 0
    done = 0
    for grid, settings, r in pieces.pictures:
        end += r
        here = end * wanted // removed - done if removed else 0
        done += here
        frames, _ = split(grid, settings)
        each, more = divmod(here, frames)
        for count, r_of_frame in ((more, each + 1), (frames - more, each)):
            if count:
                yield Picture((grid[0] * count // frames, *grid[1:]), settings, count * r_of_frame)


def plan_pictures(
    planner: Planner, features: Tensor, images: Sequence[Picture], step: Tensor, *importance: Tensor
) -> Plan:
    """Plan each image of a sequence by itself, and join the plans. At least one image loses tokens.

    Features ``[b, n, c]`` and importance ``[b, n]`` are of the n tokens in all grids.
    """
    if len(images) == 1:
        (image,) = images
        return planner(features, image.grid, image.r, image.settings, step, *importance)
    lengths = [num_tokens(image.grid) for image in images]
    parts = [values.split(lengths, dim=1) for values in (features, *importance)]
    plans = []
    for place, (grid, settings, r) in enumerate(images):
        own_features, *own_importance = (of_pictures[place] for of_pictures in parts)
        plans.append(planner(own_features, grid, r, settings, step, *own_importance) if r else None)
    return join_plans(plans, lengths)


def on_whole_grids(plan_part: Callable[..., Plan]) -> Planner:
    """Turn a planner of one part into one of whole grids, which removes r ≥ 1 tokens in total."""

    @torch.no_grad()
    def plan(
        features: Tensor, grid: Sides, r: int, settings: MergeSettings, step: Tensor, *importance: Tensor
    ) -> Plan:
        parts, part = split(grid, settings)
        n = num_tokens(part)
        features = features.reshape(-1, n, features.shape[-1])
        of_parts = [values.reshape(-1, n) for values in importance]
        return plan_part(features, part, r // parts, settings, step, *of_parts).joined(parts)

    return plan


def partition(part: Sides, settings: MergeSettings, step: Tensor, device: Device) -> tuple[Tensor, Tensor]:
    """Return sources ``[n - d]`` and destinations ``[d]``: ``strided_partition``.

    The destination of each cell is drawn by ``step`` and ``settings.seed``; without a seed, it is the first.
    """
    cell = cell_of(part, settings)
    draw = None if settings.seed is None else (settings.seed, step)
    # All blocks with the same grid share the partition of a step.
    make = functools.partial(strided_partition, part, cell, draw=draw, device=device)
    return once(step, ("partition", part, cell, settings.seed, device), make)
