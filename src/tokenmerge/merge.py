"""The functions that scripts import from ``tomesd.merge``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tokenmerge.errors import ConfigError, short_repr
from tokenmerge.ops.matching import bipartite_soft_matching
from tokenmerge.ops.partition import partition_at, whole_cells
from tokenmerge.ops.plan import make_plan

__all__ = ["bipartite_soft_matching_random2d", "do_nothing"]


def do_nothing(x: Tensor, mode: str | None = None) -> Tensor:
    """Return the tokens unchanged."""
    return x


def bipartite_soft_matching_random2d(
    metric: Tensor,
    w: int,
    h: int,
    sx: int,
    sy: int,
    r: int,
    no_rand: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]:
    """Match tokens, and return the functions that merge and unmerge them (arXiv 2303.17604).

    The signature and, for the same state of the generator, the result are those of tomesd 0.1.3. Only the
    order of the merged tokens may differ, if tokens are equally similar.

    Args:
        metric: ``[b, n, c]``: what is compared, by cosine similarity.
        w: columns of the token grid.
        h: rows of the token grid; n = w · h.
        sx: width of a destination's cell, in tokens.
        sy: height of a destination's cell, in tokens.
        r: number of tokens to remove. More than there are sources removes all; 0 or less removes none.
        no_rand: take the first token of each cell as its destination.
        generator: draws the destinations; needed unless ``no_rand``.

    Returns:
        ``merge``: ``[b, n, c]`` → ``[b, n - r, c]``, each merged token the mean of its group, and
        ``unmerge``: ``[b, n - r, c]`` → ``[b, n, c]``, each token the merged one of its group.

    Raises:
        ConfigError: the metric does not have w · h tokens, or there is no generator for random destinations.
    """
    if r <= 0:
        return do_nothing, do_nothing
    if metric.shape[1] != w * h:
        raise ConfigError(
            f"metric: expected w · h = {w * h} tokens, got {metric.shape[1]}; pass the w and h of these"
        )
    with torch.no_grad():
        inside, outside = whole_cells((h, w), (sy, sx), metric.device)
        if no_rand:
            first = torch.zeros_like(inside[0])
        elif generator is None:
            raise ConfigError("generator: expected a torch.Generator, got None; pass one, or no_rand=True")
        else:
            cells = (h // sy, w // sx, 1)
            drawn = torch.randint(sy * sx, cells, device=generator.device, generator=generator)
            first = drawn.flatten().to(metric.device)
        src, dst = partition_at(inside, outside, first)
        order, nearest = bipartite_soft_matching(metric, src, dst)
        plan = make_plan(src, dst, order, nearest, r=min(r, len(src)))

    def merge(x: Tensor, mode: str = "mean") -> Tensor:
        if mode != "mean":
            raise ConfigError(f"mode: expected 'mean', got {short_repr(mode)}; leave the argument out")
        return plan.merge(x)

    def unmerge(x: Tensor) -> Tensor:
        return plan.unmerge(x)

    return merge, unmerge
