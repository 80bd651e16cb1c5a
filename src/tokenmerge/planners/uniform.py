"""Uniform downsampling: each token goes to the destination of its cell, as in ToDo (arXiv 2402.13573)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmerge.config import MergeSettings
from tokenmerge.ops import Plan, make_plan, num_tokens, own_cell, strided_partition
from tokenmerge.planners.tome import num_removed

__all__ = ["plan_uniform"]


@torch.no_grad()
def plan_uniform(features: Tensor, grid: Sequence[int], config: MergeSettings, step: Tensor) -> Plan | None:
    """Give every source to its own cell, whatever the tokens are; ``config.ratio`` counts only if it is 0.

    Args:
        features: ``[b, n, c]``: not looked at.
        grid: (frames, rows, columns) of its n tokens.
        config: strides and the seed of the partition.
        step: integer tensor of no dimensions that changes from one denoising step to the next.
    """
    if num_removed(grid, config) == 0:
        return None
    frames, part, cell = grid[0], tuple(grid[1:]), (config.sy, config.sx)
    draw = (config.seed, step) if config.use_rand else None
    src, dst = strided_partition(part, cell, draw=draw, device=features.device)
    b = features.shape[0] * features.shape[1] // num_tokens(part)
    nearest = own_cell(part, cell, src).expand(b, -1)
    order = torch.arange(len(src), device=src.device).expand(b, -1)
    return make_plan(src, dst, order, nearest, r=len(src)).joined(frames)
