"""Bipartite soft matching: finds the most similar destination of each source and sorts these edges."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tokenmerge.ops.once import WITHOUT_LAUNCHES, made_once
from tokenmerge.ops.partition import num_tokens, with_destinations

# Largest number of similarities in memory at once. More sources are compared in slices, so that memory grows
# linearly with the number of tokens, as with fused attention. On a CPU, slices are small enough that the
# allocator reuses their memory; mapping new memory would cost a quarter of the time at 9216 tokens.
_SIMILARITIES_AT_ONCE = {"cpu": 1 << 23, "other": 1 << 26}

_HALF = (torch.float16, torch.bfloat16)


def bipartite_soft_matching(features: Tensor, src: Tensor, dst: Tensor) -> tuple[Tensor, Tensor]:
    """Connect each source to its most similar destination (arXiv 2210.09461, section 3).

    Args:
        features: ``[b, n, c]``, compared by cosine similarity.
        src: ``[s]`` indices of the sources, or ``[b, s]`` for each image.
        dst: ``[d]`` or ``[b, d]`` indices of the destinations, d ≥ 1.

    Returns:
        ``(order, nearest)``, both ``[b, s]``: positions in ``src`` from the most to the least similar edge,
        and for each source the position in ``dst`` of its destination.
    """
    similarity, nearest = most_similar(features, src, dst)
    return by_similarity(similarity), nearest


def most_similar(features: Tensor, src: Tensor, dst: Tensor) -> tuple[Tensor, Tensor]:
    """Return the similarity −1 … 1 of each source's most similar destination, and its position in ``dst``.

    Both are ``[b, s]``. The arguments are those of :func:`bipartite_soft_matching`.
    """
    sources, lengths, destinations = compared(features, src, dst)
    product, nearest = largest_products(sources, destinations)
    return product if lengths is None else product / lengths, nearest


def by_similarity(similarity: Tensor) -> Tensor:
    """Return the positions of similarities ``[b, s]`` from the largest to the smallest.

    Equal ones stay in their order, except on a CPU, whose faster sort decides for all published images.
    """
    if similarity.device.type == "cpu":
        return similarity.argsort(dim=-1, descending=True)
    return similarity.argsort(dim=-1, descending=True, stable=True)


def compared(features: Tensor, src: Tensor, dst: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the features of the sources ``[b, s, c]`` and of the destinations ``[b, d, c]`` to multiply.

    They are divided by their lengths, but for the sources where their lengths ``[b, s]`` stand between the
    two. On a CPU they are in float32 at least: a product in half precision takes a fifth of the time there on
    CPUs with units for it, and ten times as long on all others. Elsewhere see :func:`directions`.
    """
    tokens = selected(features, with_destinations(src, dst))
    s = src.shape[-1]
    if features.device.type not in WITHOUT_LAUNCHES:
        found = directions(tokens)
        return found[:, :s], None, found[:, s:]
    # The length of a source does not change which destination is nearest, so it is divided out at the end.
    exact = torch.promote_types(features.dtype, torch.float32)
    tokens = tokens.to(exact)
    lengths = tokens.norm(dim=-1).clamp(min=torch.finfo(exact).tiny)
    return tokens[:, :s], lengths[:, :s], tokens[:, s:] / lengths[:, s:].unsqueeze(-1)


def directions(tokens: Tensor) -> Tensor:
    """Return :func:`unit_tokens` to multiply, in half precision if the tokens are, but in float32 on a CPU.

    Half precision is float16, also for a model in bfloat16. Numbers of at most 1 need no larger range, and
    cosines near 1 are 8 times as fine, so that fewer of them are equal.
    """
    if tokens.dtype not in _HALF or tokens.device.type in WITHOUT_LAUNCHES:
        return unit_tokens(tokens)
    lengths = _lengths(tokens)
    if torch.compiler.is_compiling():
        return (tokens / lengths).half()
    return torch.div(tokens, lengths, out=tokens.new_empty(tokens.shape, dtype=torch.float16))


def unit_tokens(tokens: Tensor) -> Tensor:
    """Divide tokens ``[b, n, c]`` by their lengths, in float32 at least; zeros stay zeros."""
    return tokens / _lengths(tokens)


def _lengths(tokens: Tensor) -> Tensor:
    """Return the lengths ``[b, n, 1]`` of tokens, in float32 at least, and no zeros."""
    exact = torch.promote_types(tokens.dtype, torch.float32)
    lengths = torch.linalg.vector_norm(tokens, dim=-1, keepdim=True, dtype=exact)
    return lengths.clamp(min=torch.finfo(exact).tiny)


def selected(x: Tensor, index: Tensor) -> Tensor:
    """Select tokens by an index ``[k]`` for all images, or ``[b, k]`` for each: → ``[b, k, c]``."""
    if index.ndim == 1:
        return x.index_select(1, index)
    b, n, _ = x.shape
    rows = index + torch.arange(b, device=x.device).unsqueeze(1) * n
    return x.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, (b, -1))


def own_cell(grid: Sequence[int], cell: Sequence[int], tokens: Tensor) -> Tensor:
    """Return the index of each token's cell; tokens beyond the last whole cell get the nearest one.

    >>> own_cell((3, 4), (2, 2), torch.tensor([0, 3, 6, 11])).tolist()
    [0, 1, 1, 1]
    """
    cells = torch.zeros_like(tokens)
    for axis, (side, stride) in enumerate(zip(grid, cell, strict=True)):
        place = tokens // num_tokens(grid[axis + 1 :]) % side // stride
        cells = cells * (side // stride) + place.clamp(max=side // stride - 1)
    return cells


def largest_products(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maximum of each row of ``a @ bᵀ`` and its index.

    ``[b, s, c]``, ``[b, d, c]`` → ``[b, s]`` each.
    """
    at_once = _SIMILARITIES_AT_ONCE["cpu" if a.device.type == "cpu" else "other"]
    b = b.transpose(1, 2)
    per_row = b.shape[0] * b.shape[2]
    if a.shape[1] * per_row <= at_once:
        return (a @ b).max(dim=-1)
    best = [(rows @ b).max(dim=-1) for rows in a.split(max(1, at_once // per_row), dim=1)]
    return torch.cat([part.values for part in best], dim=1), torch.cat([part.indices for part in best], dim=1)


def shared_features(features: Tensor, parts: int) -> Tensor:
    """Return features for plans that images b apart share: ``[parts * b, n, c]`` → ``[b, n, parts * c]``.

    Their cosine similarity is the mean of those in the single images, such as the two prompts of guidance.
    """
    unit = F.normalize(features, dim=-1, eps=torch.finfo(features.dtype).tiny)
    return unit.unflatten(0, (parts, -1)).movedim(0, 2).flatten(2)


def guided_features(features: Tensor, parts: int, scale: float) -> Tensor:
    """Return what guidance makes of features, for plans of its copies: ``[parts * b, n, c]`` → ``[b, n, c]``.

    With u for the unguided part of the batch and g for the guided one, this is u + scale · (g − u), divided
    by the scale, so that half precision holds it. The scale is above 1. Source: this project.
    """
    unguided, guided, *_ = features.chunk(parts)
    return torch.add(guided, unguided, alpha=1 / scale - 1)


def features_if_shared(features: Tensor, parts: int, shared: Tensor) -> Tensor:
    """Return :func:`shared_features` for each image if ``shared`` is true, or its own, padded with zeros.

    ``[parts * b, n, c]`` → ``[parts * b, n, parts * c]``. The boolean tensor is not read, since a compiled
    graph cannot branch on a value.
    """
    own_channels = _own_channels(parts, features.shape[0] // parts, features.shape[2], features.device)
    return shared_features(features, parts).repeat(parts, 1, 1) * (own_channels | shared)


@made_once
def _own_channels(parts: int, b: int, c: int, device: torch.device) -> Tensor:
    """Return which channels of all parts are an image's own: ``[parts * b, 1, parts * c]``."""
    part = torch.arange(parts, device=device)
    return (part.repeat_interleave(c) == part.repeat_interleave(b).unsqueeze(1)).unsqueeze(1)
