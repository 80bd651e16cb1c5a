"""Planners: which tokens merge. One file each; they see tokens and their grid, and no model."""

from __future__ import annotations

from collections.abc import Callable

from tokenmerge.ops import Plan
from tokenmerge.planners.importance import plan_ibtm
from tokenmerge.planners.local import plan_local
from tokenmerge.planners.sito import plan_sito
from tokenmerge.planners.threshold import plan_threshold
from tokenmerge.planners.tiled import plan_tiled
from tokenmerge.planners.toma import plan_toma
from tokenmerge.planners.tome import plan_tome
from tokenmerge.planners.uniform import plan_uniform
from tokenmerge.planners.windows import plan_windows

__all__ = ["OWN_NUMBER", "PLANNERS"]

# One in config.GUIDED_PLANNERS takes one argument more: ``[b, n]``, how much guidance changed each
# token in the last step.
PLANNERS: dict[str, Callable[..., Plan | None]] = {
    "tome": plan_tome,
    "local": plan_local,
    "tiled": plan_tiled,
    "uniform": plan_uniform,
    "windows": plan_windows,
    "sito": plan_sito,
    "threshold": plan_threshold,
    "importance": plan_ibtm,
    "toma": plan_toma,
}

# These do not remove the number of tokens that the ratio says.
OWN_NUMBER = ("uniform", "windows")
