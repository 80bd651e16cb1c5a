"""Repeated merging: how many of the original tokens each token stands for, and which ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenmerge.ops.arithmetic import arithmetic
from tokenmerge.ops.plan import IndexPlan


class Tokens(NamedTuple):
    """Which of the n original tokens each of the m remaining ones stands for, after any number of merges.

    Attributes:
        sizes: ``[b, m]`` number of the n tokens that each token stands for, as float32.
        source: ``[b, n]`` index 0 … m−1 of the token that stands for each of the n.
    """

    sizes: Tensor
    source: Tensor

    def unmerge(self, y: Tensor) -> Tensor:
        """Give the n tokens the values of those that stand for them: ``[b, m, c]`` → ``[b, n, c]``."""
        return y.take_along_dim(self.source.unsqueeze(-1), dim=1)

    def remerge(self, x: Tensor) -> Tensor:
        """Undo :meth:`unmerge` exactly: ``[b, n, c]`` → ``[b, m, c]``, one of the equal values of a group."""
        places = torch.arange(self.source.shape[1], device=x.device).expand_as(self.source)
        one_each = torch.zeros_like(self.sizes, dtype=torch.int64).scatter(1, self.source, places)
        return x.take_along_dim(one_each.unsqueeze(-1), dim=1)


class SizedPlan(NamedTuple):
    """A plan whose means are weighted by token size (arXiv 2210.09461, section 3).

    Attributes:
        plan: which tokens merge.
        kept: ``[b * m, 1]`` weight of the token whose place each merged token takes; None if all sizes are 1
            before the merge.
        moved: ``[b * r, 1]`` weight of each token that merges into another one; None as for ``kept``.
        after: what the merged tokens stand for.
    """

    plan: IndexPlan
    kept: Tensor | None
    moved: Tensor | None
    after: Tokens

    def merge(self, x: Tensor) -> Tensor:
        """Replace merged tokens by their mean, weighted by size: ``[b, n, c]`` → ``[b, m, c]``.

        Differentiable. A token into which nothing merges keeps its exact value. Half-precision tokens are
        summed in float32.
        """
        if self.kept is None or self.moved is None:
            return self.plan.merge(x)
        b, n, c = x.shape
        rows = x.reshape(b * n, c)
        # The weights are float32, so the products are at least float32.
        kept = rows.index_select(0, self.plan.keep.flatten()) * self.kept
        moved = rows.index_select(0, self.plan.sources.flatten()) * self.moved
        return arithmetic().add_rows(kept, self.plan.targets.flatten(), moved).to(x.dtype).view(b, -1, c)

    def unmerge(self, y: Tensor) -> Tensor:
        """Give each token the value of its merged token: ``[b, m, c]`` → ``[b, n, c]``."""
        return self.plan.unmerge(y)


def plan_by_size(plan: IndexPlan, tokens: Tokens | None) -> SizedPlan:
    """Return the plan for ``tokens``, each of which may stand for several. None: each stands for itself."""
    if tokens is None:
        return SizedPlan(plan, None, None, Tokens(plan.sizes, plan.labels()))
    keep, sources, targets = plan.keep.flatten(), plan.sources.flatten(), plan.targets.flatten()
    before = tokens.sizes.flatten()
    after = arithmetic().add_rows(before[keep], targets, before[sources])
    return SizedPlan(
        plan,
        # Weights instead of a division at the end, so that the weight of a token left alone is exactly 1.
        kept=(before[keep] / after).unsqueeze(1),
        moved=(before[sources] / after[targets]).unsqueeze(1),
        after=Tokens(after.view(plan.keep.shape), plan.labels().gather(1, tokens.source)),
    )
