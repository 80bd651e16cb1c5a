"""Plans by the name of a planner."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tokenmerge.config import MergeSettings
from tokenmerge.ops.plan import Plan
from tokenmerge.planners import PLANNERS
from tokenmerge.planners.sequences import num_removed


def plan_by(
    name: str, x: Tensor, grid: Sequence[int], settings: MergeSettings, step: Tensor, *importance: Tensor
) -> Plan | None:
    """Plan for tokens ``[b, n, c]`` of a grid as a patched block does; None: the ratio removes no token."""
    r = num_removed(grid, settings)
    return PLANNERS[name](x, grid, r, settings, step, *importance) if r else None
