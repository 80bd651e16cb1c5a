"""SiTo, similarity-based token pruning: E. Zhang et al., AAAI 2025."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tokenmerge.config import MergeSettings
from tokenmerge.ops import (
    Plan,
    bipartite_soft_matching,
    make_plan,
    num_tokens,
    partition_at,
    uniform_noise,
    whole_cells,
)
from tokenmerge.planners.tome import num_removed

__all__ = ["plan_sito", "similarity_scores"]

# Standard deviation of the noise on the scores, which are sums of n cosines.
_NOISE = 0.1


def similarity_scores(features: Tensor) -> Tensor:
    """Sum of each token's cosine similarity to all tokens, its own included: ``[b, n, c]`` → ``[b, n]``.

    Linear in n: the product with the sum of all directions.
    """
    exact = features.to(torch.promote_types(features.dtype, torch.float32))
    unit = F.normalize(exact, dim=-1, eps=torch.finfo(exact.dtype).tiny)
    return (unit @ unit.sum(dim=1).unsqueeze(2)).squeeze(2)


@torch.no_grad()
def plan_sito(features: Tensor, grid: Sequence[int], config: MergeSettings, step: Tensor) -> Plan | None:
    """Plan one pruning: the base token of each cell, then the tokens most similar to a base token.

    The base token of a cell is the one most similar to all tokens, with a little noise so that steps differ.
    The r other tokens most similar to their nearest base token are pruned, and each goes to its nearest token
    of those that stay, base token or not. The paper copies that one and drops the pruned ones:
    ``combine="keep"``.

    Costs more than :func:`tokenmerge.planners.tome.plan_tome`: a second matching, of the pruned tokens to
    those that stay. Each image has base tokens of its own.

    Args:
        features: ``[b, n, c]``: the block's input.
        grid: (frames, rows, columns) of its n tokens; each frame is planned on its own.
        config: ratio, strides, ``use_rand`` and the seed of the noise.
        step: integer tensor of no dimensions that changes from one denoising step to the next.

    Returns:
        The plan, or None where no token would be removed.
    """
    frames, part, cell = grid[0], tuple(grid[1:]), (config.sy, config.sx)
    r = num_removed(grid, config) // frames
    if r == 0:
        return None
    features = features.reshape(-1, num_tokens(part), features.shape[-1])
    scores = similarity_scores(features)
    if config.use_rand:
        uniform = uniform_noise((config.seed, step), num_tokens(part), features.device)
        scores = scores + _NOISE * torch.special.ndtri(uniform)
    inside, outside = whole_cells(part, cell, features.device)
    src, base = partition_at(inside, outside, scores[:, inside].argmax(dim=1))

    order, _ = bipartite_soft_matching(features, src, base)
    src = src.gather(1, order)
    pruned, stay = src[:, :r], torch.cat([src[:, r:], base], dim=1)
    order, nearest = bipartite_soft_matching(features, pruned, stay)
    return make_plan(pruned, stay, order, nearest, r).joined(frames)
