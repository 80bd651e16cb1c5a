"""ToMe for vision transformers (arXiv 2210.09461): plans, and the input tokens that merged ones stand for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenmerge.ops.arithmetic import arithmetic
from tokenmerge.ops.matching import bipartite_soft_matching
from tokenmerge.ops.plan import MergePlan, make_plan


class RecordedTokens(NamedTuple):
    """The tokens of the model's input that each token stands for, after any number of merges."""

    source: Tensor  # [b, n] index 0 … m−1 of the token that stands for each token of the model's input
    sizes: Tensor  # [b, m] number of input tokens that each token stands for, as float32
    protected: int  # number of tokens before the patches

    def unmerge(self, y: Tensor) -> Tensor:
        """Give each token of the model's input the value of its merged token: ``[b, m, c]`` → ``[b, n, c]``.

        ``y`` are the tokens after the layer, as a forward hook on it gets them.

        Raises:
            ValueError: ``y`` has another number of tokens, as in a call that collects them from its layers.
        """
        if y.shape[1] != self.sizes.shape[1]:
            raise ValueError(
                f"y: expected the {self.sizes.shape[1]} tokens after the layer, got {y.shape[1]}; a call "
                "with output_hidden_states, or of forward_intermediates, unmerges them itself"
            )
        return y.take_along_dim(self.source.unsqueeze(-1), dim=1)

    def remerge(self, x: Tensor) -> Tensor:
        """Undo :meth:`unmerge` exactly: ``[b, n, c]`` → ``[b, m, c]``, one of the equal values of a group."""
        places = torch.arange(self.source.shape[1], device=x.device).expand_as(self.source)
        one_each = torch.zeros_like(self.sizes, dtype=torch.int64).scatter(1, self.source, places)
        return x.take_along_dim(one_each.unsqueeze(-1), dim=1)

    def labels(self, height: int | None = None, width: int | None = None) -> Tensor:
        """Return the groups of merged patches, for :func:`tokenmerge.images.draw_groups`.

        They are the index ``[b, height, width]`` of the token that stands for each patch, in a grid of this
        many rows and columns. Without them, the grid is square.

        Raises:
            ValueError: ``height`` × ``width`` is not the number of patches.
        """
        patches = self.source[:, self.protected :]
        n = patches.shape[1]
        if height is None or width is None:
            height = round(n**0.5)
            width = height
        if height * width != n:
            raise ValueError(
                f"height, width: expected two numbers whose product is {n}, got {height} × {width}"
            )
        return patches.reshape(-1, height, width)


class SizedPlan(NamedTuple):
    """A plan whose means are weighted by token size (section 3), or plain if all sizes before it are 1."""

    plan: MergePlan
    kept: Tensor | None  # [b * m, 1] weight of the token whose place each merged token takes
    moved: Tensor | None  # [b * r, 1] weight of each token that merges into another one
    after: RecordedTokens  # what the merged tokens stand for

    def merge(self, x: Tensor) -> Tensor:
        """Replace merged tokens by their mean, weighted by size: ``[b, n, c]`` → ``[b, m, c]``.

        Differentiable. A token into which nothing merges keeps its exact value. Sums are float32 at least.
        """
        if self.kept is None or self.moved is None:
            return self.plan.merge(x)
        b, n, c = x.shape
        rows = x.reshape(b * n, c)
        # The weights are float32, so the products are at least float32.
        kept = rows.index_select(0, self.plan.keep.flatten()) * self.kept
        moved = rows.index_select(0, self.plan.sources.flatten()) * self.moved
        return arithmetic().add_rows(kept, self.plan.targets.flatten(), moved).to(x.dtype).view(b, -1, c)


def plan_by_size(plan: MergePlan, tokens: RecordedTokens | None, protected: int) -> SizedPlan:
    """Return the plan for ``tokens``, each of which may stand for several, or for itself if it is None."""
    if tokens is None:
        return SizedPlan(plan, None, None, RecordedTokens(plan.labels(), plan.sizes, protected))
    keep = plan.keep.flatten()
    sources = plan.sources.flatten()
    targets = plan.targets.flatten()
    before = tokens.sizes.flatten()
    after = arithmetic().add_rows(before[keep], targets, before[sources])
    return SizedPlan(
        plan,
        # Weights instead of a division at the end, so that the weight of a token left alone is exactly 1.
        kept=(before[keep] / after).unsqueeze(1),
        moved=(before[sources] / after[targets]).unsqueeze(1),
        after=RecordedTokens(plan.labels().gather(1, tokens.source), after.view(plan.keep.shape), protected),
    )


def most_removed(n: int, protected: int) -> int:
    """Return the largest number of tokens that one merge can remove: half of those that are not protected.

    >>> most_removed(197, protected=1), most_removed(1, protected=1)
    (98, 0)
    """
    return max(0, n - protected) // 2


@torch.no_grad()
def plan_tome_vit(keys: Tensor, r: int, protected: int) -> MergePlan:
    """Plan one merge: split the tokens alternately, match one half to the other, merge the r best edges.

    Keys ``[b, n, d]`` are those of attention, averaged over the heads; 0 ≤ r ≤ :func:`most_removed`, which is
    at least 1. The first ``protected`` tokens never merge. The order of merged tokens is that of the paper:
    protected ones, remaining sources, destinations.
    """
    free = torch.arange(protected, keys.shape[1], device=keys.device)
    first_source = protected % 2
    src = free[first_source::2]
    dst = free[1 - first_source :: 2]
    order, nearest = bipartite_soft_matching(keys, src, dst)

    # Protected tokens are sources whose edges come last. The other sources that stay keep their order, so
    # that neighbours stay neighbours and are in different halves again in the next layer.
    first = torch.arange(protected, device=keys.device)
    nobody = first.expand(keys.shape[0], -1)
    stay = order[:, r:].sort(dim=1).values + protected
    order = torch.cat([order[:, :r] + protected, nobody, stay], dim=1)
    nearest = torch.cat([torch.zeros_like(nobody), nearest], dim=1)
    return make_plan(torch.cat([first, src]), dst, order, nearest, r)
