"""What all planners share: the steps from the settings and token grids of a sequence to its plan.

They are in the order of a call. The settings say how many tokens one grid loses and which parts it has. A
sequence of pictures is then planned picture by picture; a planner plans one part of a grid at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tokenmerge.config import MergeSettings
from tokenmerge.ops import Plan, join_plans, num_destinations, num_tokens, strided_partition

GridShape = tuple[int, int, int]  # frames, rows, columns
# The grid of each picture of a sequence, in order, and its settings.
Pictures = Sequence[tuple[GridShape, MergeSettings]]
# A planner of whole grids. It takes (features [b, n, c], grid, settings, step), and importance or scores
# [b, n] if it looks at them.
Planner = Callable[..., Plan | None]


def num_removed(grid: Sequence[int], settings: MergeSettings) -> int:
    """Number of tokens that the ratio removes from a grid of (frames, rows, columns), over all frames.

    It is ratio · n, rounded down for each part of the grid that merges on its own. It is 0 for a grid of
    fewer than ``min_tokens`` tokens, or without a whole cell.

    >>> num_removed((1, 64, 64), MergeSettings(ratio=0.5)), num_removed((1, 1, 9), MergeSettings(ratio=0.5))
    (2048, 0)
    """
    if num_tokens(grid) < settings.min_tokens:
        return 0
    parts, part = split(grid, settings)
    if not num_destinations(part, cell_of(part, settings)):
        return 0
    return parts * int(num_tokens(part) * settings.ratio)


def split(grid: Sequence[int], settings: MergeSettings) -> tuple[int, tuple[int, ...]]:
    """Number of parts of a grid of (frames, rows, columns) that merge on their own, and the grid of one part.

    The parts are the frames, with a grid of (rows, columns). Where cells have several frames (``st`` > 1),
    the whole grid is one part.
    """
    return (grid[0], tuple(grid[1:])) if settings.st == 1 else (1, tuple(grid))


def cell_of(part: Sequence[int], settings: MergeSettings) -> tuple[int, ...]:
    """Size of the cells of a part in tokens, with the same axes as the grid of the part."""
    return (settings.st, settings.sy, settings.sx)[-len(part) :]


class TokenSequence(NamedTuple):
    """The pictures in the sequence of tokens that a block gets.

    Attributes:
        pictures: grid and settings of each.
        tokens: number of tokens in all of them.
        removed: how many of these the settings remove.
    """

    pictures: Pictures
    tokens: int
    removed: int

    @classmethod
    def of(cls, pictures: Pictures) -> TokenSequence:
        """The sequence of these pictures."""
        removed = sum(num_removed(grid, settings) for grid, settings in pictures)
        return cls(tuple(pictures), sum(num_tokens(grid) for grid, _ in pictures), removed)


def sequence_of(grids: Sequence[GridShape], settings: MergeSettings) -> TokenSequence:
    """The sequence of pictures with these grids. It is cached, since every block asks for it in every call.

    Args:
        grids: (frames, rows, columns) of each picture, the picture being made first.
        settings: those of the picture being made; ``reference_ratio`` is the ratio of all others.

    >>> sequence_of(((1, 4, 4), (1, 2, 4)), MergeSettings(ratio=0, reference_ratio=0.75))[1:]
    (24, 6)
    """
    # torch.compile warns about cached functions, and the sides of a grid may be symbolic in its graphs.
    if torch.compiler.is_compiling():
        return _sequence_of(tuple(grids), settings)
    return _remembered(tuple(grids), settings)


def _sequence_of(grids: tuple[GridShape, ...], settings: MergeSettings) -> TokenSequence:
    others = settings.of_references
    return TokenSequence.of([(grid, others if i else settings) for i, grid in enumerate(grids)])


_remembered = functools.lru_cache(maxsize=1024)(_sequence_of)


def plan_pictures(
    planner: Planner, features: Tensor, pictures: Pictures, step: Tensor, *importance: Tensor
) -> Plan | None:
    """Plan each picture of a sequence by itself, and join the plans.

    Args:
        planner: a planner of whole grids.
        features: ``[b, n, c]``, of the n tokens in all grids.
        pictures: grid and settings of each, in the order of the sequence.
        step: as for the planner.
        importance: ``[b, n]`` importance or scores, for planners that look at them.

    Returns:
        The plan; None if no token would be removed.
    """
    if len(pictures) == 1:
        return planner(features, *pictures[0], step, *importance)
    lengths = [num_tokens(grid) for grid, _ in pictures]
    of_pictures = zip(*(values.split(lengths, dim=1) for values in (features, *importance)), strict=True)
    plans = [
        planner(own_features, grid, own, step, *own_importance) if num_removed(grid, own) else None
        for (own_features, *own_importance), (grid, own) in zip(of_pictures, pictures, strict=True)
    ]
    return None if all(plan is None for plan in plans) else join_plans(plans, lengths)


def on_whole_grids(plan_part: Callable[..., Plan]) -> Planner:
    """Turn a planner of one part into one of whole grids; it returns None if no token would be removed."""

    @torch.no_grad()
    def plan(
        features: Tensor, grid: Sequence[int], settings: MergeSettings, step: Tensor, *importance: Tensor
    ) -> Plan | None:
        r = num_removed(grid, settings)
        if r == 0:
            return None
        parts, part = split(grid, settings)
        n = num_tokens(part)
        features = features.reshape(-1, n, features.shape[-1])
        of_parts = [values.reshape(-1, n) for values in importance]
        return plan_part(features, part, r // parts, settings, step, *of_parts).joined(parts)

    return plan


def partition(
    part: Sequence[int], settings: MergeSettings, step: Tensor, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Sources ``[n - d]`` and destinations ``[d]`` of a part: :func:`tokenmerge.ops.strided_partition`.

    The destination of each cell is drawn anew for each ``step`` and ``settings.seed``, or is the first token
    of the cell where there is no seed.
    """
    cell = cell_of(part, settings)
    if settings.seed is None or torch.compiler.is_compiling():
        draw = None if settings.seed is None else (settings.seed, step)
        return strided_partition(part, cell, draw=draw, device=device)
    known = _drawn.setdefault(step, {})
    key = tuple(part), cell, settings.seed, device
    if key not in known:
        with torch.inference_mode(False):  # autograd cannot save tensors of inference mode
            known[key] = strided_partition(part, cell, draw=(settings.seed, step), device=device)
    drawn: tuple[Tensor, Tensor] = known[key]
    return drawn


# The partitions of each step, as long as its number lives: all blocks with the same grid share them.
_drawn: Any = WeakTensorKeyDictionary()
