"""Planners: which tokens merge. One file each; they see tokens and their grid, and no model."""

from __future__ import annotations

from collections.abc import Callable

from tokenmerge.methods.grid import plan_grid
from tokenmerge.methods.local import plan_local
from tokenmerge.methods.tome import plan_tome
from tokenmerge.ops import Plan

__all__ = ["PLANNERS"]

PLANNERS: dict[str, Callable[..., Plan | None]] = {
    "tome": plan_tome,
    "local": plan_local,
    "grid": plan_grid,
}
