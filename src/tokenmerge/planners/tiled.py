"""ToMe with matching in a tile around each source: linear in the number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tokenmerge.config import MergeSettings
from tokenmerge.ops import Plan, make_plan, tiled_matching
from tokenmerge.planners._grid import cell_of, partition

# Side of a tile in cells. A source is compared with the destinations of up to 32 × 32 cells.
SIDE = 16


def plan_tiled(features: Tensor, grid: Sequence[int], r: int, settings: MergeSettings, step: Tensor) -> Plan:
    """Plan as ``tome``, but compare each source only with the destinations in the tile around it.

    The plan is that of ``tome`` where one tile covers the grid: up to 16 × 16 cells, with no tokens beyond
    the last whole cell.
    """
    src, dst = partition(grid, settings, step, features.device)
    order, nearest = tiled_matching(features, grid, cell_of(grid, settings), src, dst, SIDE)
    return make_plan(src, dst, order, nearest, r)
