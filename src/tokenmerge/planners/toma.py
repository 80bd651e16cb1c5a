"""ToMA, token merge with attention: arXiv 2509.10918."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tokenmerge.config import MergeSettings
from tokenmerge.ops import Plan, make_soft_plan, num_tokens, tile
from tokenmerge.planners.tome import num_removed

__all__ = ["facility_location", "plan_toma"]

# Cosines are multiplied by this before the softmax: at 1000 a destination nearer by 0.01 has all of a token.
_SHARPNESS = 1000.0


def facility_location(similarity: Tensor, real: Tensor, count: int) -> Tensor:
    """Choose places that are as similar as possible to all: maximise f(D) = Σ_i max_{j ∈ D} S_ij.

    Greedily, one after the other, which reaches at least 1 − 1/e of the best f; of equals the first. All sets
    at once, and as many small kernels as ``count``.

    Args:
        similarity: ``[..., p, p]``: S, symmetric, −1 … 1; 0 in padding.
        real: ``[..., p]`` which places hold something; only these are chosen, while there are any.
        count: number of places to choose, ≤ p.

    Returns:
        ``[..., count]`` places, in the order of the choice.
    """
    taken = ~real.expand(similarity.shape[:-1])
    covered = torch.full_like(similarity[..., 0], -1.0)
    chosen = []
    for _ in range(count):
        gain = (similarity - covered.unsqueeze(-2)).clamp_(min=0).sum(dim=-1)
        best = gain.masked_fill(taken, -1).argmax(dim=-1, keepdim=True)
        row = similarity.take_along_dim(best.unsqueeze(-1), dim=-2).squeeze(-2)
        covered, taken = covered.maximum(row), taken.scatter(-1, best, True)
        chosen.append(best)
    return torch.cat(chosen, dim=-1)


@torch.no_grad()
def plan_toma(features: Tensor, grid: Sequence[int], config: MergeSettings, step: Tensor) -> Plan | None:
    """Plan one soft merge: facility-location destinations of each tile, tokens shared out by a softmax.

    A token is shared out over the destinations of its tile by softmax(1000 · cosine). Merging takes the mean
    by these shares, and unmerging gives each token the mean of its destinations by the same shares: dense
    products of small matrices, which suit a GPU. Planning is linear in n, but chooses destinations one after
    the other, by many small kernels, so that a plan is worth holding (the paper: for 5 to 10 steps). Nothing
    is drawn.

    Args:
        features: ``[b, n, c]``: the block's input, compared in float32.
        grid: (frames, rows, columns) of its n tokens; each frame is planned on its own.
        config: ratio; ``sy`` × ``sx``, the tile: a larger one leaves more to choose from and takes longer, in
            proportion to its tokens. Tiles of a grid that they do not divide are a little larger.
        step: not looked at.

    Returns:
        The plan, or None where no token would be removed.
    """
    frames, part = grid[0], tuple(grid[1:])
    n, r = num_tokens(part), num_removed(grid, config) // frames
    if r == 0:
        return None
    tiles = tile(part, (config.sy, config.sx), features.device)
    exact = features.to(torch.promote_types(features.dtype, torch.float32)).reshape(-1, n, features.shape[-1])
    unit = F.normalize(exact, dim=-1, eps=torch.finfo(exact.dtype).tiny)
    unit = unit.index_select(1, tiles.token.flatten()).unflatten(1, tiles.token.shape)  # [b, t, p, c]
    similarity = (unit @ unit.transpose(2, 3)) * tiles.real.unsqueeze(1) * tiles.real.unsqueeze(2)

    # Tiles lose tokens in proportion to their size, all of them together exactly r.
    size = tiles.real.sum(dim=1)
    end = size.cumsum(0)
    destinations = size - (r * end // n - r * (end - size) // n)
    largest = tiles.real.shape[1]
    chosen = facility_location(similarity, tiles.real, largest - r * largest // n)
    is_destination = torch.arange(chosen.shape[2], device=size.device) < destinations.unsqueeze(1)

    logits = _SHARPNESS * similarity.take_along_dim(chosen.unsqueeze(3), dim=2)  # [b, t, k, p]
    logits = logits.masked_fill(~is_destination.unsqueeze(2), float("-inf"))
    shares = logits.softmax(dim=2) * tiles.real.unsqueeze(1)
    return make_soft_plan(tiles, chosen, is_destination, shares, n - r).joined(frames)
