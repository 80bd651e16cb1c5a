"""Region-adaptive sampling: Z. Liu et al., arXiv 2502.10389."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmerge.config import MergeSettings
from tokenmerge.ops import Plan, make_plan

COMPARES_NOTHING = True


def plan_ras(
    features: Tensor, grid: Sequence[int], r: int, settings: MergeSettings, step: Tensor, scores: Tensor
) -> Plan:
    """Skip the r tokens with the largest scores, wherever they are; nothing is compared or drawn.

    A skipped token merges into the token nearest to it in the order of rows. With token-wise reuse this
    matters only while nothing is cached for the token, and for ``proportional``.

    ``scores`` ``[b, n]`` is the standard deviation of the model's last result over its channels, averaged
    over the area of a token and lowered for tokens that were skipped often
    (:func:`tokenmerge.runtime.last_result.scores_of`). The cells of the grid only limit the ratio.
    """
    b, n = scores.shape
    skipped = scores.topk(r, dim=1).indices
    # Both in the order of rows: those that stay, then those that are skipped.
    in_order = torch.zeros_like(scores, dtype=torch.uint8).scatter(1, skipped, 1).argsort(dim=1, stable=True)
    dst, src = in_order[:, : n - r].contiguous(), in_order[:, n - r :].contiguous()
    after = torch.searchsorted(dst, src).clamp(max=n - r - 1)
    before = (after - 1).clamp(min=0)
    nearer = (dst.gather(1, after) - src).abs() < (src - dst.gather(1, before)).abs()
    order = torch.arange(r, device=src.device).expand(b, -1)
    return make_plan(src, dst, order, torch.where(nearer, after, before), r)
