"""The structure stage of SDTM: whole windows merge, the most uniform first (arXiv 2505.11707)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tokenmerge.config import MergeSettings
from tokenmerge.ops import Plan, make_plan, num_tokens, own_cell, strided_partition, whole_cells
from tokenmerge.planners.tome import num_removed

__all__ = ["plan_windows", "uniformity"]


def uniformity(features: Tensor, windows: Tensor) -> Tensor:
    """Mean cosine similarity of the pairs of tokens within a window, linear in their number.

    Args:
        features: ``[b, n, c]``.
        windows: ``[k, d]`` indices of the k ≥ 2 tokens of each of d windows.

    Returns:
        ``[b, d]``, −1/(k − 1) … 1.
    """
    k = len(windows)
    exact = features.to(torch.promote_types(features.dtype, torch.float32))
    unit = F.normalize(exact, dim=-1, eps=torch.finfo(exact.dtype).tiny)
    unit = unit.index_select(1, windows.flatten()).unflatten(1, windows.shape)  # [b, k, d, c]
    # The square of a sum holds every pair twice, and each token with itself once.
    alone = unit.square().sum(dim=(1, 3))
    return (unit.sum(dim=1).square().sum(dim=2) - alone) / (k * (k - 1))


@torch.no_grad()
def plan_windows(features: Tensor, grid: Sequence[int], config: MergeSettings, step: Tensor) -> Plan | None:
    """Merge the windows whose tokens are most alike, each into one token, and leave all others whole.

    As fast to plan as any method that looks at the tokens: nothing is compared across windows. It keeps the
    detail of windows that hold some, and is coarse where the last windows to merge are not uniform; SDTM
    changes to :func:`tokenmerge.planners.tome.plan_tome` for the later steps, which make the detail.

    Args:
        features: ``[b, n, c]``: the block's input.
        grid: (frames, rows, columns) of its n tokens; each frame is planned on its own. Tokens beyond the
            last whole window stay.
        config: ratio; ``sy`` × ``sx``, the window; ``use_rand`` and seed: which of its tokens' places the
            merged one takes. As many windows merge as remove no more than ratio · n tokens, at least one.
        step: integer tensor of no dimensions that changes from one denoising step to the next.

    Returns:
        The plan, or None where no token would be removed.
    """
    frames, part, window = grid[0], tuple(grid[1:]), (config.sy, config.sx)
    others = num_tokens(window) - 1
    r = num_removed(grid, config) // frames
    if r == 0:
        return None
    features = features.reshape(-1, num_tokens(part), features.shape[-1])
    inside, _ = whole_cells(part, window, features.device)
    most_uniform = uniformity(features, inside).argsort(dim=1, descending=True)
    draw = (config.seed, step) if config.use_rand else None
    src, dst = strided_partition(part, window, draw=draw, device=features.device)

    # All sources of a window, then those of the next; the partition lists one of each, then another of each.
    b, d = most_uniform.shape
    within = torch.arange(others, device=src.device) * d
    order = (most_uniform.unsqueeze(2) + within).flatten(1)
    beyond = torch.arange(others * d, len(src), device=src.device).expand(b, -1)
    nearest = own_cell(part, window, src).expand(b, -1)
    r = min(d, max(1, r // others)) * others
    return make_plan(src, dst, torch.cat([order, beyond], dim=1), nearest, r).joined(frames)
