"""A plan: the indices of one merge, computed once and used to merge, to unmerge and for pictures."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from tokenmerge.ops import kernels
from tokenmerge.ops.arithmetic import arithmetic
from tokenmerge.ops.constants import first_rows, ones, rows_of_images
from tokenmerge.ops.once import made_once, once
from tokenmerge.ops.soft import SoftPlan


class IndexPlan(NamedTuple):
    """Which of n tokens become which of m = n − r merged tokens, for each of b images.

    Indices are rows of ``[b * n, c]`` or ``[b * m, c]``: selecting whole rows is many times faster than a
    gather with an index for each element.

    Attributes:
        keep: ``[b, m]`` row of the token that each merged token starts from and whose place it takes.
        sources: ``[b, r]`` rows of the tokens that merge into another one.
        targets: ``[b, r]`` merged rows into which ``sources`` merge.
        inverse: ``[b, n]`` merged row that holds each original token.
        sizes: ``[b, m]`` number of original tokens in each merged one, as float32.
        weights: ``[b, r]`` weight of each of ``sources`` in its mean and in ``sizes``: 1, or 0 for a token
            that is dropped; None: all are 1.
    """

    keep: Tensor
    sources: Tensor
    targets: Tensor
    inverse: Tensor
    sizes: Tensor
    weights: Tensor | None = None

    def labels(self) -> Tensor:
        """``[b, n]``: index 0 … m−1 of the merged token that stands for each token of its image."""
        return self.inverse % self.keep.shape[1]

    def kept(self) -> Tensor:
        """``[b, m]``: index 0 … n−1 of the token whose place each merged token takes."""
        return self.keep % self.inverse.shape[1]

    def merge(self, x: Tensor) -> Tensor:
        """See the function :func:`merge`."""
        b, n, c = x.shape
        rows = x.reshape(b * n, c)
        exact = torch.promote_types(x.dtype, torch.float32)
        # Autograd and graphs need each step by itself; otherwise fewer launches do the same.
        fuses = not (torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing())  # type: ignore[attr-defined]
        if fuses:
            chosen = rows.index_select(0, once(self.keep, "chosen", self._chosen, self.sources)).to(exact)
            total, moved = chosen[: self.keep.numel()], chosen[self.keep.numel() :]
        else:
            total = rows.index_select(0, self.keep.flatten()).to(exact)
            moved = rows.index_select(0, self.sources.flatten()).to(exact)
        if self.weights is not None:
            moved = moved * self.weights.view(-1, 1)
        total, sizes = arithmetic().add_rows(total, self.targets.flatten(), moved), self.sizes.view(-1, 1)
        if fuses:  # a tensor of its own, so that the memory of the moved tokens is free
            return torch.div(total, sizes, out=x.new_empty(total.shape)).view(b, -1, c)
        return total.div_(sizes).to(x.dtype).view(b, -1, c)

    def _chosen(self) -> Tensor:
        """Return the rows of the tokens that stay, then those of the tokens that merge into them."""
        return torch.cat([self.keep.flatten(), self.sources.flatten()])

    def unmerge(self, y: Tensor) -> Tensor:
        """See the function :func:`unmerge`."""
        b, m, c = y.shape
        return y.reshape(b * m, c).index_select(0, self.inverse.flatten()).view(b, -1, c)

    def in_batch(self) -> IndexPlan:
        """Return this plan with rows of the whole batch, if its indices start at 0 in each image."""
        (b, m), n = self.keep.shape, self.inverse.shape[1]
        image = torch.arange(b, device=self.keep.device).unsqueeze(1)
        return IndexPlan(
            keep=self.keep + image * n,
            sources=self.sources + image * n,
            targets=self.targets + image * m,
            inverse=self.inverse + image * m,
            sizes=self.sizes,
            weights=self.weights,
        )

    def joined(self, parts: int) -> IndexPlan:
        """Return the plan for b / ``parts`` images, each of which joins ``parts`` images."""
        if parts == 1:
            return self
        b = len(self.keep) // parts
        return IndexPlan(
            keep=self.keep.reshape(b, -1),
            sources=self.sources.reshape(b, -1),
            targets=self.targets.reshape(b, -1),
            inverse=self.inverse.reshape(b, -1),
            sizes=self.sizes.reshape(b, -1),
            weights=None if self.weights is None else self.weights.reshape(b, -1),
        )

    def repeated(self, times: int) -> IndexPlan:
        """Return the plan for a batch that repeats the b images of this plan ``times`` times."""
        (b, m), n, device = self.keep.shape, self.inverse.shape[1], self.keep.device
        before_n = first_rows(times, b * n, 0, device).unsqueeze(2)
        before_m = first_rows(times, b * m, 0, device).unsqueeze(2)
        return IndexPlan(
            keep=(self.keep + before_n).flatten(0, 1),
            sources=(self.sources + before_n).flatten(0, 1),
            targets=(self.targets + before_m).flatten(0, 1),
            inverse=(self.inverse + before_m).flatten(0, 1),
            sizes=self.sizes.repeat(times, 1),
            weights=None if self.weights is None else self.weights.repeat(times, 1),
        )

    def after(self, before: int) -> IndexPlan:
        """Return the plan for sequences in which ``before`` more tokens, left alone, precede the n."""
        start = torch.full((len(self.keep),), before, device=self.keep.device)
        return self.within(start, before + self.inverse.shape[1])

    def within(self, start: Tensor, total: int) -> IndexPlan:
        """Return the plan for sequences of ``total`` tokens that contain the n tokens of this plan in a row.

        Args:
            start: ``[b]`` index of the first of the n tokens in the sequence of each image.
            total: at least start + n.
        """
        (b, m), n = self.keep.shape, self.inverse.shape[1]
        start = start.unsqueeze(1)
        # Merged sequence: first the tokens outside the n, then the merged ones.
        others = torch.arange(total - n, device=start.device).expand(b, -1)
        beside = others + n * (others >= start)
        inverse = torch.empty(b, total, dtype=torch.int64, device=start.device).scatter(
            1,
            torch.cat([beside, start + torch.arange(n, device=start.device)], dim=1),
            torch.cat([others, self.labels() + (total - n)], dim=1),
        )
        return IndexPlan(
            keep=torch.cat([beside, self.kept() + start], dim=1),
            sources=self.sources % n + start,
            targets=self.targets % m + (total - n),
            inverse=inverse,
            sizes=torch.cat([torch.ones_like(others, dtype=self.sizes.dtype), self.sizes], dim=1),
            weights=self.weights,
        ).in_batch()


# A plan of either kind: each token merges into one other, or is shared out over several.
Plan: TypeAlias = IndexPlan | SoftPlan


def make_plan(
    src: Tensor, dst: Tensor, order: Tensor, nearest: Tensor, r: int, weights: Tensor | None = None
) -> IndexPlan:
    """Return a plan that merges the r sources with the best edges and leaves all other tokens alone.

    Args:
        src: ``[s]`` indices of the sources, or ``[b, s]`` for each image.
        dst: ``[d]`` or ``[b, d]`` indices of the destinations.
        order: ``[b, s]`` positions in ``src``, the best edge first.
        nearest: ``[b, s]`` for each source the position in ``dst`` of its destination.
        r: number of tokens to remove, 0 ≤ r ≤ s.
        weights: ``[b, s]`` 1 for a source that counts in the mean of its destination, 0 for a source that is
            dropped; None: all count.
    """
    b, s = order.shape
    device = order.device
    n, m = s + dst.shape[-1], s + dst.shape[-1] - r
    # The tokens that merge, those left alone, and the destinations. The latter two are the merged sequence.
    tokens = torch.cat([src.expand(b, -1).gather(1, order), dst.expand(b, -1)], dim=1)
    targets = nearest.gather(1, order[:, :r]) + first_rows(b, m, s - r, device)
    rows = torch.cat([targets, rows_of_images(b, m, device)], dim=1)
    inverse = torch.empty(b, n, dtype=torch.int64, device=device).scatter(1, tokens, rows)
    counts = ones(b, r, device) if weights is None else weights.gather(1, order[:, :r])
    sizes = ones(1, b * m, device).scatter_add(1, targets.view(1, -1), counts.view(1, -1)).view(b, m)
    by_image = (tokens + first_rows(b, n, 0, device)).flatten()
    chosen = by_image.index_select(0, _kept_first(b, n, r, device))
    keep, sources = chosen[: b * m].view(b, m), chosen[b * m :].view(b, r)
    once(keep, "chosen", lambda: chosen, sources)
    return IndexPlan(
        keep=keep,
        sources=sources,
        targets=targets,
        inverse=inverse,
        sizes=sizes,
        weights=None if weights is None else counts,
    )


@made_once
def _kept_first(b: int, n: int, r: int, device: torch.device) -> Tensor:
    """Return the places in b rows of n tokens: of those behind the first r in each row, then of these r."""
    places = torch.arange(b * n, device=device).view(b, n)
    return torch.cat([places[:, r:].flatten(), places[:, :r].flatten()])


def merge(plan: Plan, x: Tensor) -> Tensor:
    """Replace merged tokens by their mean: ``[b, n, c]`` → ``[b, m, c]``, differentiable.

    Half-precision tokens are summed in float32, because a group can have thousands of tokens.
    """
    return plan.merge(x)


def keep_destinations(plan: Plan, x: Tensor) -> Tensor:
    """Keep the destinations and unmerged tokens, drop the others: ``[b, n, c]`` → ``[b, m, c]``."""
    b, n, c = x.shape
    return x.reshape(b * n, c).index_select(0, plan.keep.flatten()).view(b, -1, c)


def unmerge(plan: Plan, y: Tensor) -> Tensor:
    """Give each token the value of its merged token: ``[b, m, c]`` → ``[b, n, c]``."""
    return plan.unmerge(y)


def add_unmerged(plan: Plan, x: Tensor, y: Tensor) -> Tensor:
    """Add to each token the value of its merged token: ``[b, n, c]``, ``[b, m, c]`` → ``[b, n, c]``."""
    if kernels.ON and isinstance(plan, IndexPlan) and x.dtype == y.dtype and kernels.used(x, y):
        return kernels.add_rows(x, y, plan.inverse)
    return x + plan.unmerge(y)
