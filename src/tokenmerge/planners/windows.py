"""The structure stage of SDTM: whole windows merge, the most uniform first (arXiv 2505.11707)."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmerge.config import MergeSettings
from tokenmerge.ops.matching import own_cell, unit_tokens
from tokenmerge.ops.partition import Sides, num_tokens, whole_cells
from tokenmerge.ops.plan import Plan, make_plan
from tokenmerge.planners.sequences import cell_of, partition


def uniformity(features: Tensor, windows: Tensor) -> Tensor:
    """Return the mean cosine similarity of all pairs of tokens in each window: ``[b, n, c]`` → ``[b, d]``.

    ``windows`` are ``[k, d]`` indices of the k ≥ 2 tokens of each of d windows. The cost is linear in n.
    """
    k = len(windows)
    unit = unit_tokens(features).index_select(1, windows.flatten())
    unit = unit.unflatten(1, windows.shape)  # [b, k, d, c]
    # The square of the sum counts every pair twice, and each token's product with itself once.
    alone = unit.square().sum(dim=(1, 3))
    return (unit.sum(dim=1).square().sum(dim=2) - alone) / (k * (k - 1))


def plan_windows(features: Tensor, grid: Sides, r: int, settings: MergeSettings, step: Tensor) -> Plan:
    """Merge the most uniform windows of ``sy`` × ``sx`` tokens into one token each; leave the others whole.

    Windows with detail stay intact as long as enough uniform ones merge. SDTM switches to ``tome`` for the
    later steps, which draw the detail.

    As many windows merge as possible without removing more than r tokens, but at least one. Tokens beyond the
    last whole window stay. The merged token takes the place of the window's destination.
    """
    window = cell_of(grid, settings)
    others = num_tokens(window) - 1
    inside, _ = whole_cells(grid, window, features.device)
    most_uniform = uniformity(features, inside).argsort(dim=1, descending=True)
    src, dst = partition(grid, settings, step, features.device)

    # Put all sources of a window next to each other. The partition lists one of every window, then the next.
    b, d = most_uniform.shape
    order = (most_uniform.unsqueeze(2) + torch.arange(others, device=src.device) * d).flatten(1)
    beyond = torch.arange(others * d, len(src), device=src.device).expand(b, -1)
    nearest = own_cell(grid, window, src).expand(b, -1)
    r = min(d, max(1, r // others)) * others
    return make_plan(src, dst, torch.cat([order, beyond], dim=1), nearest, r)
