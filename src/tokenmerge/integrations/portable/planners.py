"""The planners ``tome``, ``tiled`` and ``uniform``: features + grid + settings → plan."""

from __future__ import annotations

import numpy as np

from tokenmerge.config import MergeSettings
from tokenmerge.integrations.portable.arrays import Array, Arrays
from tokenmerge.integrations.portable.matching import bipartite_soft_matching, shared_features, tiled_matching
from tokenmerge.integrations.portable.partition import own_cell, partition
from tokenmerge.integrations.portable.plan import Plan, make_plan, repeated

PLANNERS = ("tome", "tiled", "uniform")
# Side of a tile in cells. "tiled" compares each source with the destinations of up to 32 × 32 cells.
_SIDE = 16


def num_removed(grid: tuple[int, int], settings: MergeSettings) -> int:
    """Number r of tokens removed from a grid of (rows, columns); 0 if nothing merges.

    ratio · n, rounded down; ``"uniform"`` removes every source, whatever the ratio.
    """
    n, cells = grid[0] * grid[1], (grid[0] // settings.sy) * (grid[1] // settings.sx)
    r = int(n * settings.ratio) if cells and n >= settings.min_tokens else 0
    return n - cells if r and settings.planner == "uniform" else r


def plan_tokens(
    xp: Arrays, features: Array, grid: tuple[int, int], settings: MergeSettings, step: int, parts: int = 1
) -> Plan | None:
    """Plan one merge: partition, match, keep the r best edges.

    Args:
        xp: operations for ``features``.
        features: ``[b, n, c]``: the block's input.
        grid: (rows, columns) of its n tokens, the columns fastest.
        settings: planner, ratio, strides and the seed of the partition.
        step: number of the denoising step, as :func:`partition.step_number` makes it.
        parts: number of images, b / ``parts`` apart, that share a plan, such as those of the two prompts of
            guidance.

    Returns:
        The plan, or None if no token would be removed.
    """
    r, cell = num_removed(grid, settings), (settings.sy, settings.sx)
    if r == 0:
        return None
    if parts > 1:
        shared = plan_tokens(xp, shared_features(xp, features, parts), grid, settings, step)
        assert shared is not None  # r > 0
        return repeated(xp, shared, parts)
    src, dst = partition(grid, cell, None if settings.seed is None else (settings.seed, step))
    if settings.planner == "tome":
        order, nearest = bipartite_soft_matching(xp, features, src, dst)
    elif settings.planner == "tiled":
        order, nearest = tiled_matching(xp, features, grid, cell, src, dst, _SIDE)
    else:
        own = [np.arange(len(src)), own_cell(grid, cell, src)]
        order, nearest = (xp.repeat(xp.index(index, features), features.shape[0]) for index in own)
    return make_plan(xp, src, dst, order, nearest, r)
