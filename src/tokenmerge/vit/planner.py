"""ToMe for vision transformers: D. Bolya et al., arXiv 2210.09461."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmerge.ops import IndexPlan, bipartite_soft_matching, make_plan


def most_removed(n: int, protected: int) -> int:
    """Return the largest number of tokens that one merge can remove: half of those that are not protected.

    >>> most_removed(197, protected=1), most_removed(1, protected=1)
    (98, 0)
    """
    return max(0, n - protected) // 2


@torch.no_grad()
def plan_tome_vit(keys: Tensor, r: int, protected: int) -> IndexPlan:
    """Plan one merge: split the tokens alternately, match one half to the other, merge the r best edges.

    Args:
        keys: ``[b, n, d]`` keys of attention, averaged over the heads. At least two of the n tokens are not
            protected.
        r: number of tokens to remove, 0 ≤ r ≤ :func:`most_removed`.
        protected: number of tokens at the beginning that never merge, such as the class token.

    Returns:
        The plan. The order of merged tokens is that of the paper: protected ones, remaining sources,
        destinations.
    """
    free = torch.arange(protected, keys.shape[1], device=keys.device)
    src, dst = free[protected % 2 :: 2], free[1 - protected % 2 :: 2]
    order, nearest = bipartite_soft_matching(keys, src, dst)

    # Protected tokens are sources whose edges come last. The other sources that stay keep their order, so
    # that neighbours stay neighbours and are in different halves again in the next layer.
    first = torch.arange(protected, device=keys.device)
    nobody = first.expand(keys.shape[0], -1)
    stay = order[:, r:].sort(dim=1).values + protected
    order = torch.cat([order[:, :r] + protected, nobody, stay], dim=1)
    nearest = torch.cat([torch.zeros_like(nobody), nearest], dim=1)
    return make_plan(torch.cat([first, src]), dst, order, nearest, r)
