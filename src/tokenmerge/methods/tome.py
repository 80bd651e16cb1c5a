"""ToMe for Stable Diffusion: T. Bolya and J. Hoffman, arXiv 2303.17604."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmerge.config import ToMeConfig
from tokenmerge.ops import Plan, bipartite_soft_matching, make_plan, num_destinations, strided_partition

__all__ = ["num_removed", "plan_tome"]


def num_removed(height: int, width: int, config: ToMeConfig) -> int:
    """Number r of tokens removed from a grid: ratio · height · width, or 0 where there is no whole cell.

    >>> num_removed(64, 64, ToMeConfig(ratio=0.5)), num_removed(1, 9, ToMeConfig(ratio=0.5))
    (2048, 0)
    """
    has_destinations = num_destinations(height, width, config.sx, config.sy) > 0
    return int(height * width * config.ratio) if has_destinations else 0


@torch.no_grad()
def plan_tome(features: Tensor, height: int, width: int, config: ToMeConfig, step: Tensor) -> Plan | None:
    """Plan one merge: partition, match, keep the r best edges.

    Args:
        features: ``[b, n, c]`` with n = height·width: the block's input.
        height: rows of the token grid.
        width: columns of the token grid.
        config: ratio, strides and the seed of the partition.
        step: integer tensor of no dimensions that changes from one denoising step to the next.

    Returns:
        The plan, or None where no token would be removed.
    """
    r = num_removed(height, width, config)
    if r == 0:
        return None
    draw = (config.seed, step) if config.use_rand else None
    src, dst = strided_partition(height, width, config.sx, config.sy, draw=draw, device=features.device)
    order, nearest = bipartite_soft_matching(features, src, dst)
    return make_plan(src, dst, order, nearest, r)
