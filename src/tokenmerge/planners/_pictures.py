"""Plans for sequences of several pictures: that being made, then its reference pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from tokenmerge.config import MergeSettings
from tokenmerge.ops import Plan, join_plans, num_tokens
from tokenmerge.planners._grid import num_removed

# The grid (frames, rows, columns) of each picture of a sequence, in order, and what holds for it.
Pictures = Sequence[tuple[tuple[int, int, int], MergeSettings]]


def pictures_of(grids: Sequence[tuple[int, int, int]], settings: MergeSettings) -> Pictures:
    """The pictures with these grids: ``ratio`` holds for the first, ``reference_ratio`` for all others."""
    return [(grid, settings.of_references if i else settings) for i, grid in enumerate(grids)]


def num_removed_in_all(pictures: Pictures) -> int:
    """Number of tokens that the ratios remove from a sequence of pictures.

    >>> settings = MergeSettings(ratio=0, reference_ratio=0.75)
    >>> num_removed_in_all(pictures_of([(1, 4, 4), (1, 2, 4)], settings))
    6
    """
    return sum(num_removed(grid, settings) for grid, settings in pictures)


def num_tokens_in_all(pictures: Pictures) -> int:
    """Number of tokens in a sequence of pictures."""
    return sum(num_tokens(grid) for grid, _ in pictures)


def plan_pictures(
    planner: Callable[..., Plan | None],
    features: Tensor,
    pictures: Pictures,
    step: Tensor,
    *importance: Tensor,
) -> Plan | None:
    """Plan each picture of a sequence by itself, and join the plans.

    Args:
        planner: of whole grids.
        features: ``[b, n, c]``, of n tokens in all grids.
        pictures: grid and settings of each, in the order of the sequence.
        step: as for the planner.
        importance: ``[b, n]``, where the planner looks at it.

    Returns:
        None where no token would be removed.
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
