"""Importance-based token merging: H. Wu et al., ICCV 2025, arXiv 2411.16720."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmerge.config import MergeSettings
from tokenmerge.ops import Plan, make_plan, most_similar, num_destinations, num_tokens, uniform_noise
from tokenmerge.planners.tome import num_removed

__all__ = ["plan_ibtm"]

# How many more tokens than stay are in the pool of the important ones.
_POOL = 1.4


@torch.no_grad()
def plan_ibtm(
    features: Tensor, grid: Sequence[int], config: MergeSettings, step: Tensor, importance: Tensor
) -> Plan | None:
    """As :func:`tokenmerge.planners.tome.plan_tome`, with destinations among the important tokens.

    The pool is the 1.4 · (n − r) most important tokens. From it come as many destinations as there are cells,
    by a seeded draw; all other tokens are sources, and those outside the pool merge before any within it.
    Where nothing is important there may be no destination nearby, and tokens merge over long distances.

    Args:
        features: ``[b, n, c]``: the block's input.
        grid: (frames, rows, columns) of its n tokens; each frame is planned on its own.
        config: ratio; strides: their cells say how many destinations there are, not where; ``use_rand`` and
            seed of the draw, without which the most important tokens are the destinations.
        step: integer tensor of no dimensions that changes from one denoising step to the next.
        importance: ``[b, n]`` how much guidance changes each token, such as the last step's
            |ε_cond − ε_uncond|; only its order counts.

    Returns:
        The plan, or None where no token would be removed.
    """
    frames, part, cell = grid[0], tuple(grid[1:]), (config.sy, config.sx)
    r = num_removed(grid, config) // frames
    if r == 0:
        return None
    n, d = num_tokens(part), num_destinations(part, cell)
    features, importance = features.reshape(-1, n, features.shape[-1]), importance.reshape(-1, n)
    pool = importance.topk(min(n, max(d, int(_POOL * (n - r)))), dim=1).indices
    dst = pool[:, :d]
    if config.use_rand:
        luck = uniform_noise((config.seed, step), n, features.device)[pool]
        dst = pool.gather(1, luck.topk(d, dim=1).indices)
    is_dst = torch.zeros_like(importance, dtype=torch.uint8).scatter(1, dst, 1)
    src = is_dst.argsort(dim=1, stable=True)[:, : n - d]

    similarity, nearest = most_similar(features, src, dst)
    outside = torch.ones_like(importance).scatter(1, pool, 0).gather(1, src)
    # Cosines end at 1, so that 3 more puts every token outside the pool before all others.
    order = (similarity.to(torch.float32) + 3 * outside).argsort(dim=1, descending=True)
    return make_plan(src, dst, order, nearest, r).joined(frames)
