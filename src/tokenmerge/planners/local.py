"""ToMe with matching in the 3 × 3 cells around each source: linear in the number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tokenmerge.config import MergeSettings
from tokenmerge.ops import Plan, local_matching, make_plan
from tokenmerge.planners._grid import cell_of, partition

TAKES_PENALTY = True


def plan_local(
    features: Tensor,
    grid: Sequence[int],
    r: int,
    settings: MergeSettings,
    step: Tensor,
    penalty: Tensor | None = None,
) -> Plan:
    """Plan as ``tome``, but compare each source only with the destinations of the nearest 9 cells."""
    src, dst = partition(grid, settings, step, features.device)
    order, nearest = local_matching(features, grid, cell_of(grid, settings), src, dst, penalty)
    return make_plan(src, dst, order, nearest, r)
