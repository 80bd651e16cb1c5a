"""ToMe for Stable Diffusion: D. Bolya and J. Hoffman, arXiv 2303.17604."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmerge.config import MergeSettings
from tokenmerge.ops import (
    Plan,
    bipartite_soft_matching,
    make_plan,
    num_destinations,
    num_tokens,
    strided_partition,
)

__all__ = ["num_removed", "plan_tome"]


def num_removed(grid: Sequence[int], config: MergeSettings) -> int:
    """Number r of tokens removed from a grid of (frames, rows, columns).

    ratio · n, rounded down for each part that merges on its own, or 0 where there is no whole cell.

    >>> num_removed((1, 64, 64), ToMeConfig(ratio=0.5)), num_removed((1, 1, 9), ToMeConfig(ratio=0.5))
    (2048, 0)
    """
    if num_tokens(grid) < config.min_tokens:
        return 0
    parts, part, cell = _parts(grid, config)
    return parts * int(num_tokens(part) * config.ratio) if num_destinations(part, cell) else 0


@torch.no_grad()
def plan_tome(features: Tensor, grid: Sequence[int], config: MergeSettings, step: Tensor) -> Plan | None:
    """Plan one merge: partition, match, keep the r best edges.

    Args:
        features: ``[b, n, c]``: the block's input.
        grid: (frames, rows, columns) of its n tokens, the columns fastest.
        config: ratio, strides and the seed of the partition.
        step: integer tensor of no dimensions that changes from one denoising step to the next.

    Returns:
        The plan, or None where no token would be removed.
    """
    if num_removed(grid, config) == 0:
        return None
    parts, part, cell = _parts(grid, config)
    features = features.reshape(-1, num_tokens(part), features.shape[-1])
    draw = (config.seed, step) if config.use_rand else None
    src, dst = strided_partition(part, cell, draw=draw, device=features.device)
    order, nearest = bipartite_soft_matching(features, src, dst)
    return make_plan(src, dst, order, nearest, r=num_removed(grid, config) // parts).joined(parts)


def _parts(grid: Sequence[int], config: MergeSettings) -> tuple[int, Sequence[int], Sequence[int]]:
    """How many parts of a grid merge on their own, the grid of one, and its cell."""
    if config.st == 1:
        return grid[0], grid[1:], (config.sy, config.sx)
    return 1, grid, (config.st, config.sy, config.sx)
