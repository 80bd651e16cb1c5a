"""ToMe with each source compared to the destinations in a tile around it: linear in the number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmerge.config import MergeSettings
from tokenmerge.ops import Plan, make_plan, num_tokens, strided_partition, tiled_matching
from tokenmerge.planners.tome import num_removed

__all__ = ["plan_tiled"]

# In cells: each source sees the destinations of up to 32 × 32 of them.
SIDE = 16


@torch.no_grad()
def plan_tiled(features: Tensor, grid: Sequence[int], config: MergeSettings, step: Tensor) -> Plan | None:
    """As :func:`tokenmerge.planners.tome.plan_tome`, with tiled matching within each frame.

    On grids of up to 16 × 16 cells without tokens beside them, which one tile holds, it is the same.
    """
    r = num_removed(grid, config)
    if r == 0:
        return None
    frames, part, cell = grid[0], tuple(grid[1:]), (config.sy, config.sx)
    features = features.reshape(-1, num_tokens(part), features.shape[-1])
    draw = (config.seed, step) if config.use_rand else None
    src, dst = strided_partition(part, cell, draw=draw, device=features.device)
    order, nearest = tiled_matching(features, part, cell, src, dst, SIDE)
    return make_plan(src, dst, order, nearest, r=r // frames).joined(frames)
