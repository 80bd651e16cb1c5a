"""Importance-based token merging: H. Wu et al., ICCV 2025, arXiv 2411.16720."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tokenmerge.config import MergeSettings
from tokenmerge.ops.matching import by_similarity, most_similar
from tokenmerge.ops.partition import Sides, num_destinations, num_tokens, uniform_noise
from tokenmerge.ops.plan import Plan, make_plan
from tokenmerge.planners.sequences import cell_of

# Size of the pool of important tokens, as a multiple of the number of tokens that stay.
_POOL = 1.4
# Added to the cosines of tokens outside the pool, which lie between -1 and 1, to put them before all others.
_BEFORE_ALL = 3


def plan_importance(
    features: Tensor, grid: Sides, r: int, settings: MergeSettings, step: Tensor, importance: Tensor
) -> Plan:
    """Plan as ``tome``, with destinations drawn from the important tokens.

    The pool holds the 1.4 · (n − r) most important tokens. A seeded draw takes from it as many destinations
    as the grid has cells; with ``settings.seed=None``, the most important tokens are the destinations.
    All other tokens are sources, and those outside the pool merge before those in it. Of ``importance``
    ``[b, n]``, which says how much guidance changed each token in the last step, only the order counts.
    """
    n = features.shape[1]
    d = num_destinations(grid, cell_of(grid, settings))
    pool = importance.topk(min(n, max(d, int(_POOL * (n - r)))), dim=1).indices
    dst = pool[:, :d]
    if settings.seed is not None:
        luck = uniform_noise((settings.seed, step), n, features.device)[pool]
        dst = pool.gather(1, luck.topk(d, dim=1).indices)
    is_dst = torch.zeros_like(importance, dtype=torch.uint8).scatter(1, dst, 1)
    src = is_dst.argsort(dim=1, stable=True)[:, : n - d]

    similarity, nearest = most_similar(features, src, dst)
    outside = torch.ones_like(importance).scatter(1, pool, 0).gather(1, src)
    order = by_similarity(similarity + _BEFORE_ALL * outside)
    return make_plan(src, dst, order, nearest, r)


def importance_of_tokens(change: Tensor, *grids: tuple[int, int, int]) -> Tensor | None:
    """Return how much guidance changes each token, for planners (arXiv 2411.16720), or None for other shapes.

    ``change`` is the difference that guidance makes in a model's result: ``[b, c, h, w]``,
    ``[b, c, f, h, w]``, or tokens ``[b, n, c]`` on the model's finest grid. The mean absolute change over the
    area of each token is ``[b, n]``, or ``[b · f, n]`` for a result of several frames and a grid of one.
    """
    size = change.abs().float()
    if size.ndim == 3:
        tokens = size.mean(dim=2)
        return tokens if tokens.shape[1] == sum(map(num_tokens, grids)) else None
    grid = grids[0]
    if size.ndim not in (4, 5) or (size.ndim == 4 and grid[0] > 1) or len(grids) > 1:
        return None
    frames = size.shape[2] if grid[0] > 1 else 1
    size = size.mean(dim=1).reshape(-1, 1, frames, *size.shape[-2:])
    return F.adaptive_avg_pool3d(size, grid).flatten(1)
