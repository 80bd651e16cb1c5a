"""Uniform downsampling: each token merges into the destination of its cell, as in ToDo (arXiv 2402.13573)."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmerge.config import MergeSettings
from tokenmerge.ops.matching import own_cell
from tokenmerge.ops.once import once
from tokenmerge.ops.partition import Sides
from tokenmerge.ops.plan import MergePlan, Plan, make_plan
from tokenmerge.planners.sequences import cell_of, partition


def plan_uniform(features: Tensor, grid: Sides, r: int, settings: MergeSettings, step: Tensor) -> Plan:
    """Merge every source into the destination of its own cell.

    The values of the features are not used. All sources merge, whatever r is; with ratio 0 nothing merges.
    """
    b = features.shape[0]
    cell = cell_of(grid, settings)
    src, dst = partition(grid, settings, step, features.device)

    def make() -> MergePlan:
        nearest = own_cell(grid, cell, src).expand(b, -1)
        order = torch.arange(len(src), device=src.device).expand(b, -1)
        return make_plan(src, dst, order, nearest, r=len(src))

    # All blocks with the same grid share the plan: in a step, or in all steps if nothing is drawn.
    return once(src, ("uniform", grid, cell, b), make)
