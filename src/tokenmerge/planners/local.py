"""ToMe with matching in the 3 × 3 cells around each source: linear in the number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tokenmerge.config import MergeSettings
from tokenmerge.ops import Plan, local_matching, make_plan
from tokenmerge.planners._grid import cell_of, partition


def plan_local(features: Tensor, grid: Sequence[int], r: int, settings: MergeSettings, step: Tensor) -> Plan:
    """Plan as ``tome``, but compare each source only with the destinations of the nearest 9 cells."""
    src, dst = partition(grid, settings, step, features.device)
    order, nearest = local_matching(features, grid, cell_of(grid, settings), src, dst)
    return make_plan(src, dst, order, nearest, r)
