"""ToMe with each source compared to the destinations around it only: linear in the number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmerge.config import MergeSettings
from tokenmerge.ops import Plan, local_matching, make_plan, num_tokens, strided_partition
from tokenmerge.planners.tome import num_removed

__all__ = ["plan_local"]


@torch.no_grad()
def plan_local(features: Tensor, grid: Sequence[int], config: MergeSettings, step: Tensor) -> Plan | None:
    """As :func:`tokenmerge.planners.tome.plan_tome`, with local matching within each frame."""
    r = num_removed(grid, config)
    if r == 0:
        return None
    frames, part, cell = grid[0], tuple(grid[1:]), (config.sy, config.sx)
    features = features.reshape(-1, num_tokens(part), features.shape[-1])
    draw = (config.seed, step) if config.use_rand else None
    src, dst = strided_partition(part, cell, draw=draw, device=features.device)
    order, nearest = local_matching(features, part, cell, src, dst)
    return make_plan(src, dst, order, nearest, r=r // frames).joined(frames)
