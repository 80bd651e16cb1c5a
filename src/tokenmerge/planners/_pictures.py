"""Plans for sequences of several pictures: that being made, then its reference pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from tokenmerge.config import MergeSettings
from tokenmerge.ops import Plan, join_plans, num_tokens
from tokenmerge.planners._grid import num_removed

Grids = Sequence[tuple[int, int, int]]


def num_removed_in_all(grids: Grids, settings: MergeSettings) -> int:
    """Number of tokens that the ratios remove from a sequence of pictures.

    >>> num_removed_in_all([(1, 4, 4), (1, 2, 4)], MergeSettings(ratio=0, reference_ratio=0.75))
    6
    """
    return sum(num_removed(grid, own) for grid, own in _with_settings(grids, settings))


def plan_pictures(
    planner: Callable[..., Plan | None],
    features: Tensor,
    grids: Grids,
    settings: MergeSettings,
    step: Tensor,
    *importance: Tensor,
) -> Plan | None:
    """Plan each picture of a sequence by itself, and join the plans.

    Args:
        planner: of whole grids.
        features: ``[b, n, c]``, of n tokens in all grids.
        grids: (frames, rows, columns) of each picture, in the order of the sequence.
        settings: ``ratio`` holds for the first picture, ``reference_ratio`` for all others.
        step: as for the planner.
        importance: ``[b, n]``, where the planner looks at it.

    Returns:
        None where no token would be removed.
    """
    if len(grids) == 1:
        return planner(features, grids[0], settings, step, *importance)
    lengths = [num_tokens(grid) for grid in grids]
    of_pictures = zip(*(values.split(lengths, dim=1) for values in (features, *importance)), strict=True)
    plans = [
        planner(own_features, grid, own, step, *own_importance)
        for (own_features, *own_importance), (grid, own) in zip(
            of_pictures, _with_settings(grids, settings), strict=True
        )
    ]
    return None if all(plan is None for plan in plans) else join_plans(plans, lengths)


def _with_settings(
    grids: Grids, settings: MergeSettings
) -> Iterator[tuple[tuple[int, int, int], MergeSettings]]:
    """The grid of each picture, with what holds for it."""
    yield grids[0], settings
    for grid in grids[1:]:
        yield grid, settings.of_references
