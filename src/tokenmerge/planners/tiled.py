"""ToMe with matching in a tile around each source: linear in the number of tokens."""

from __future__ import annotations

from torch import Tensor

from tokenmerge.config import MergeSettings
from tokenmerge.ops.partition import Sides
from tokenmerge.ops.plan import Plan
from tokenmerge.ops.tiles import SIDES, tiled_plan
from tokenmerge.planners.sequences import cell_of, partition


def plan_tiled(features: Tensor, grid: Sides, r: int, settings: MergeSettings, step: Tensor) -> Plan:
    """Plan as ``tome``, but compare each source only with the destinations in the tile around it.

    The plan is that of ``tome`` if one tile covers the grid: up to 16 × 16 cells, or 2 × 8 × 8 if cells reach
    over time, with no tokens beyond the last whole cell of a row or column.
    """
    src, dst = partition(grid, settings, step, features.device)
    return tiled_plan(features, grid, cell_of(grid, settings), src, dst, SIDES[len(grid)], r)
