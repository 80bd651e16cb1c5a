"""Planners: which tokens merge. One file each; they see tokens and their grid, and no model."""

from __future__ import annotations

from collections.abc import Callable

from tokenmerge.methods.local import plan_local
from tokenmerge.methods.tome import plan_tome
from tokenmerge.methods.uniform import plan_uniform
from tokenmerge.ops import Plan

__all__ = ["PLANNERS"]

PLANNERS: dict[str, Callable[..., Plan | None]] = {
    "tome": plan_tome,
    "local": plan_local,
    "uniform": plan_uniform,
}
