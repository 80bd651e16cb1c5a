"""SiTo, similarity-based token pruning: E. Zhang et al., AAAI 2025."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmerge.config import MergeSettings
from tokenmerge.ops.matching import bipartite_soft_matching, unit_tokens
from tokenmerge.ops.partition import Sides, partition_at, uniform_noise, whole_cells
from tokenmerge.ops.plan import Plan, make_plan
from tokenmerge.planners.sequences import cell_of

# Standard deviation of the noise that is added to the scores, which are sums of n cosines.
_NOISE = 0.1


def similarity_scores(features: Tensor) -> Tensor:
    """Sum each token's cosine similarity to all tokens, its own included: ``[b, n, c]`` → ``[b, n]``.

    The cost is linear in n: each normalised token is multiplied by the sum of all of them.
    """
    unit = unit_tokens(features)
    return (unit * unit.sum(dim=1, keepdim=True)).sum(dim=2)


def plan_sito(features: Tensor, grid: Sides, r: int, settings: MergeSettings, step: Tensor) -> Plan:
    """Choose a base token in each cell, then prune the r tokens that are most similar to a base token.

    The base token of a cell is the one most similar to all tokens. A little noise makes the choice differ
    between steps; ``settings.seed=None`` switches it off. Each pruned token goes to the most similar token
    that stays, base token or not, which takes a second matching. The paper drops pruned tokens and copies the
    results of those that stay: ``combine="keep"``.
    """
    scores = similarity_scores(features)
    if settings.seed is not None:
        uniform = uniform_noise((settings.seed, step), features.shape[1], features.device)
        scores = scores + _NOISE * torch.special.ndtri(uniform)
    inside, outside = whole_cells(grid, cell_of(grid, settings), features.device)
    src, base = partition_at(inside, outside, scores[:, inside].argmax(dim=1))

    order, _ = bipartite_soft_matching(features, src, base)
    src = src.gather(1, order)
    pruned = src[:, :r]
    stay = torch.cat([src[:, r:], base], dim=1)
    order, nearest = bipartite_soft_matching(features, pruned, stay)
    return make_plan(pruned, stay, order, nearest, r)
