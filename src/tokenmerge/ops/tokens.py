"""Tokens that merge again and again: how many each stands for, and which."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tokenmerge.ops.plan import IndexPlan, merge, unmerge

__all__ = ["SizedPlan", "Tokens", "plan_by_size"]


class Tokens(NamedTuple):
    """What m tokens stand for, after any number of merges of n.

    Attributes:
        sizes: ``[b, m]`` how many of the n tokens each stands for, as float32.
        source: ``[b, n]`` for each of the n tokens which of the m, 0 … m−1, holds it.
    """

    sizes: Tensor
    source: Tensor

    def unmerge(self, y: Tensor) -> Tensor:
        """Give each of the n tokens the result of the one that holds it: ``[b, m, c]`` → ``[b, n, c]``."""
        return y.take_along_dim(self.source.unsqueeze(-1), dim=1)


class SizedPlan(NamedTuple):
    """A plan whose tokens count by their size (arXiv 2210.09461, section 3).

    Attributes:
        plan: which tokens merge.
        kept: ``[b * m, 1]`` the share in each merged token of the one whose place it takes; None where all
            sizes are 1 before the merge.
        moved: ``[b * r, 1]`` the share of each token that merges into another one, or None.
        after: what the merged tokens stand for.
    """

    plan: IndexPlan
    kept: Tensor | None
    moved: Tensor | None
    after: Tokens

    def merge(self, x: Tensor) -> Tensor:
        """Replace merged tokens by their mean, weighted by size: ``[b, n, c]`` → ``[b, m, c]``.

        Differentiable. A token that nothing merges into keeps its value exactly. Half-precision tokens are
        summed in float32.
        """
        if self.kept is None or self.moved is None:
            return merge(self.plan, x)
        b, n, c = x.shape
        rows = x.reshape(b * n, c)
        # The shares are float32, and so are these then, or float64.
        kept = rows.index_select(0, self.plan.keep.flatten()) * self.kept
        moved = rows.index_select(0, self.plan.sources.flatten()) * self.moved
        return kept.index_add(0, self.plan.targets.flatten(), moved).to(x.dtype).view(b, -1, c)

    def unmerge(self, y: Tensor) -> Tensor:
        """Give each token the result of the merged token that holds it: ``[b, m, c]`` → ``[b, n, c]``."""
        return unmerge(self.plan, y)


def plan_by_size(plan: IndexPlan, tokens: Tokens | None) -> SizedPlan:
    """The plan for tokens that stand for several each; None: before it each stands for itself."""
    if tokens is None:
        return SizedPlan(plan, None, None, Tokens(plan.sizes, plan.labels()))
    keep, sources, targets = plan.keep.flatten(), plan.sources.flatten(), plan.targets.flatten()
    before = tokens.sizes.flatten()
    after = before[keep].index_add(0, targets, before[sources])
    return SizedPlan(
        plan,
        # Shares of the sum rather than one division behind it: that of a token left alone is exactly 1.
        kept=(before[keep] / after).unsqueeze(1),
        moved=(before[sources] / after[targets]).unsqueeze(1),
        after=Tokens(after.view(plan.keep.shape), plan.labels().gather(1, tokens.source)),
    )
