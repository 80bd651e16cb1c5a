"""Bipartite soft matching: each source's most similar destination, and the best of these edges first."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["bipartite_soft_matching", "shared_features"]

# How many similarities are held at once; more sources are compared in slices, so that memory grows linearly
# with the number of tokens as it does with fused attention. On a CPU a slice is small enough for its memory
# to be reused, and not mapped anew for every product, which costs a quarter of the time at 9216 tokens.
_SIMILARITIES_AT_ONCE = {"cpu": 1 << 23, "other": 1 << 26}


def bipartite_soft_matching(features: Tensor, src: Tensor, dst: Tensor) -> tuple[Tensor, Tensor]:
    """Connect each source to its most similar destination (arXiv 2210.09461, section 3).

    Args:
        features: ``[b, n, c]``: what is compared, by cosine similarity.
        src: ``[s]`` indices of the sources.
        dst: ``[d]`` indices of the destinations, d ≥ 1.

    Returns:
        ``(order, nearest)``, both ``[b, s]``: positions in ``src`` from the most to the least similar edge,
        and for each source the position in ``dst`` of its destination.
    """
    smallest = torch.finfo(features.dtype).tiny
    sources = features.index_select(1, src)
    destinations = F.normalize(features.index_select(1, dst), dim=-1, eps=smallest).transpose(1, 2)
    product, nearest = _largest_products(sources, destinations)
    # The length of a source does not change which destination is nearest, so it divides last and once.
    similarity = product / sources.norm(dim=-1).clamp(min=smallest)
    return similarity.argsort(dim=-1, descending=True), nearest


def _largest_products(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum and its place in each row of ``a @ b``: ``[b, s, c]``, ``[b, c, d]`` → ``[b, s]``."""
    at_once = _SIMILARITIES_AT_ONCE["cpu" if a.device.type == "cpu" else "other"]
    per_row = b.shape[0] * b.shape[2]
    if a.shape[1] * per_row <= at_once:
        return (a @ b).max(dim=-1)
    best = [(rows @ b).max(dim=-1) for rows in a.split(max(1, at_once // per_row), dim=1)]
    return torch.cat([part.values for part in best], dim=1), torch.cat([part.indices for part in best], dim=1)


def shared_features(features: Tensor, parts: int) -> Tensor:
    """Features by which ``parts`` images get one plan: ``[parts * b, n, c]`` → ``[b, n, parts * c]``.

    Their cosine similarity is the mean of the images' own. Those b apart share a plan, as the two halves of
    a batch with classifier-free guidance.
    """
    unit = F.normalize(features, dim=-1, eps=torch.finfo(features.dtype).tiny)
    return unit.unflatten(0, (parts, -1)).movedim(0, 2).flatten(2)
