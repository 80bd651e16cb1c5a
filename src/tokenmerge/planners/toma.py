"""ToMA, token merge with attention: arXiv 2509.10918."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmerge.config import MergeSettings
from tokenmerge.ops.matching import directions
from tokenmerge.ops.partition import Sides
from tokenmerge.ops.plan import Plan
from tokenmerge.ops.soft import make_soft_plan, tile
from tokenmerge.planners.sequences import cell_of

# Factor of the cosines in the softmax. With 1000, a lead of 0.01 takes nearly the whole token.
_SHARPNESS = 1000.0
# Gains closer than this for each place of a tile count as equal. Two places that are left and most similar to
# each other have the same gain, which rounding would make different, and differently in another batch.
_EQUAL = 1e-5


def facility_location(similarity: Tensor, real: Tensor, count: int) -> Tensor:
    """Choose the set D of places that best represents all: maximise f(D) = Σ_i max_{j ∈ D} S_ij.

    The choice is greedy, which reaches at least 1 − 1/e of the largest f. It takes the first of the places
    that are equal within rounding. The number of kernels grows with ``count`` ≤ p. The similarity
    ``[..., p, p]`` is symmetric, −1 … 1, and 0 in padding, which ``real`` ``[..., p]`` tells from other
    places: it is chosen only after all others. The places ``[..., count]`` are in the order of the choice.
    """
    taken = ~real.expand(similarity.shape[:-1])
    covered = torch.full_like(similarity[..., 0], -1.0)
    chosen = []
    for _ in range(count):
        gain = (similarity - covered.unsqueeze(-2)).clamp_(min=0).sum(dim=-1).masked_fill(taken, -1)
        most = gain.amax(dim=-1, keepdim=True) - _EQUAL * similarity.shape[-1]
        best = (gain >= most).to(torch.uint8).argmax(dim=-1, keepdim=True)
        row = similarity.take_along_dim(best.unsqueeze(-1), dim=-2).squeeze(-2)
        covered = covered.maximum(row)
        taken = taken.scatter(-1, best, True)
        chosen.append(best)
    return torch.cat(chosen, dim=-1)


def plan_toma(features: Tensor, grid: Sides, r: int, settings: MergeSettings, step: Tensor) -> Plan:
    """Plan a soft merge: facility-location destinations in each tile, tokens shared out by a softmax.

    Each token is shared out over the destinations of its tile by softmax(1000 · cosine). Merging takes means
    weighted by these shares; unmerging gives each token the mean of its destinations, by the same shares.
    Both are products of small dense matrices, which suit a GPU. Nothing is random.

    Planning time is linear in n, but destinations are chosen one after the other with many small kernels. So
    plans are worth keeping for several steps. A tile has ``sy`` × ``sx`` tokens; where these do not divide
    the grid, tiles are a little larger.
    """
    n = features.shape[1]
    tiles = tile(grid, cell_of(grid, settings), features.device)
    unit = directions(features).index_select(1, tiles.token.flatten())
    unit = unit.unflatten(1, tiles.token.shape)  # [b, t, p, c]
    # Many similarities are added up below, so they are in float32 at least.
    similarity = (unit @ unit.transpose(2, 3)).to(torch.promote_types(unit.dtype, torch.float32))
    similarity = similarity * tiles.real.unsqueeze(1) * tiles.real.unsqueeze(2)
    # A token whose values are not numbers is like no other token, so the shares of all others stay finite.
    similarity = similarity.nan_to_num(nan=0.0)

    # Tiles lose tokens in proportion to their size, and exactly r in total.
    size = tiles.real.sum(dim=1)
    end = size.cumsum(0)
    destinations = size - (r * end // n - r * (end - size) // n)
    largest = tiles.real.shape[1]
    chosen = facility_location(similarity, tiles.real, largest - r * largest // n)
    is_destination = torch.arange(chosen.shape[2], device=size.device) < destinations.unsqueeze(1)

    logits = _SHARPNESS * similarity.take_along_dim(chosen.unsqueeze(3), dim=2)  # [b, t, k, p]
    logits = logits.masked_fill(~is_destination.unsqueeze(2), float("-inf"))
    shares = logits.softmax(dim=2) * tiles.real.unsqueeze(1)
    return make_soft_plan(tiles, chosen, is_destination, shares, n - r)
