"""A plan: the indices of one merge, computed once and used to merge, to unmerge and for images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from tokenmerge.ops.arithmetic import arithmetic
from tokenmerge.ops.once import first_numbers, first_rows, once, ones
from tokenmerge.ops.partition import with_destinations
from tokenmerge.ops.soft import SoftPlan, join_soft

# On these devices, one kernel makes the means of all groups. The meta device counts as one of them.
_AVERAGING_DEVICES = {"cuda", "meta"}


class MergePlan(NamedTuple):
    """Which of n tokens become which of m = n − r merged tokens, for each of b images.

    Indices are rows of ``[b * n, c]`` or ``[b * m, c]``: selecting rows is many times faster than a gather.
    """

    keep: Tensor  # [b, m] row of the token that each merged token starts from and whose place it takes
    sources: Tensor  # [b, r] rows of the tokens that merge into another one
    targets: Tensor  # [b, r] merged rows into which ``sources`` merge
    inverse: Tensor  # [b, n] merged row that holds each original token
    sizes: Tensor  # [b, m] number of original tokens in each merged one, as float32
    # [b, r] weight of each of ``sources`` in its mean and in ``sizes``, which is 1, or 0 for a token that is
    # dropped. None stands for ones.
    weights: Tensor | None = None

    def labels(self) -> Tensor:
        """Return the index 0 … m−1 of the merged token that stands for each token: ``[b, n]``."""
        return self.inverse % self.keep.shape[1]

    def kept(self) -> Tensor:
        """Return the index 0 … n−1 of the token whose place each merged token takes: ``[b, m]``."""
        b, n = self.inverse.shape
        return self.keep if b == 1 else self.keep % n

    def merge(self, x: Tensor) -> Tensor:
        """Replace merged tokens by their mean: ``[b, n, c]`` → ``[b, m, c]``, differentiable.

        Half-precision tokens are summed in float32, because a group can have thousands of tokens.
        """
        b, n, c = x.shape
        rows = x.reshape(b * n, c)
        exact = torch.promote_types(x.dtype, torch.float32)
        # Autograd and graphs need each step by itself; otherwise fewer launches do the same.
        fuses = not (torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing())  # type: ignore[attr-defined]
        if fuses and self.weights is None and x.device.type in _AVERAGING_DEVICES:
            tokens, starts = once(self.inverse, "groups", self._groups)
            return F.embedding_bag(tokens, rows, starts, mode="mean").view(b, -1, c)
        if fuses:
            chosen = rows.index_select(0, once(self.keep, "chosen", self._chosen, self.sources)).to(exact)
            total = chosen[: self.keep.numel()]
            moved = chosen[self.keep.numel() :]
        else:
            total = rows.index_select(0, self.keep.flatten()).to(exact)
            moved = rows.index_select(0, self.sources.flatten()).to(exact)
        if self.weights is not None:
            moved = moved * self.weights.view(-1, 1)
        total = arithmetic().add_rows(total, self.targets.flatten(), moved)
        sizes = self.sizes.view(-1, 1)
        if fuses:  # a tensor of its own, so that the memory of the moved tokens is free
            return torch.div(total, sizes, out=x.new_empty(total.shape)).view(b, -1, c)
        return total.div_(sizes).to(x.dtype).view(b, -1, c)

    def _chosen(self) -> Tensor:
        """Return the rows of the tokens that stay, then those of the tokens that merge into them."""
        return torch.cat([self.keep.flatten(), self.sources.flatten()])

    def _groups(self) -> tuple[Tensor, Tensor]:
        """Return the rows of the tokens, one merged token after the other, and where each of them begins."""
        merged, tokens = self.inverse.flatten().sort(stable=True)
        return tokens, torch.searchsorted(merged, first_numbers(self.keep.numel(), merged.device))

    def unmerge(self, y: Tensor) -> Tensor:
        """Give each token the value of its merged token: ``[b, m, c]`` → ``[b, n, c]``."""
        b, m, c = y.shape
        return y.reshape(b * m, c).index_select(0, self.inverse.flatten()).view(b, -1, c)

    def shifted(self, tokens: Tensor | int, merged: Tensor | int) -> MergePlan:
        """Return the plan with ``tokens`` added to the rows of tokens, and ``merged`` to merged rows."""
        return MergePlan(
            self.keep + tokens,
            self.sources + tokens,
            self.targets + merged,
            self.inverse + merged,
            self.sizes,
            self.weights,
        )

    def in_images(self) -> MergePlan:
        """Return the plan with indices that start at 0 in each image, instead of rows."""
        n = self.inverse.shape[1]
        m = self.keep.shape[1]
        return MergePlan(
            self.kept(), self.sources % n, self.targets % m, self.labels(), self.sizes, self.weights
        )

    def in_batch(self) -> MergePlan:
        """Return the plan with rows of the whole batch: the inverse of :meth:`in_images`."""
        b, m = self.keep.shape
        n = self.inverse.shape[1]
        device = self.keep.device
        return self.shifted(first_rows(b, n, 0, device), first_rows(b, m, 0, device))

    def joined(self, parts: int) -> MergePlan:
        """Return the plan for b / ``parts`` images, each of which joins ``parts`` images."""
        if parts == 1:
            return self
        b = len(self.keep) // parts
        fields: list[Any] = [None if field is None else field.reshape(b, -1) for field in self]
        return MergePlan(*fields)

    def repeated(self, times: int) -> MergePlan:
        """Return the plan for a batch that repeats the b images of this plan ``times`` times."""
        b, m = self.keep.shape
        n = self.inverse.shape[1]
        device = self.keep.device
        tokens = first_rows(times, b * n, 0, device)
        merged = first_rows(times, b * m, 0, device)
        shifted = self.shifted(tokens.unsqueeze(2), merged.unsqueeze(2))
        return MergePlan(
            shifted.keep.flatten(0, 1),
            shifted.sources.flatten(0, 1),
            shifted.targets.flatten(0, 1),
            shifted.inverse.flatten(0, 1),
            self.sizes.repeat(times, 1),
            None if self.weights is None else self.weights.repeat(times, 1),
        )

    def after(self, before: int) -> MergePlan:
        """Return the plan for sequences in which ``before`` more tokens, left alone, precede the n."""
        b, m = self.keep.shape
        n = self.inverse.shape[1]
        device = self.keep.device
        # Each image moves behind the text of those before it and its own.
        shift = first_rows(b, before, before, device)
        shifted = self.shifted(shift, shift)
        tokens = first_numbers(b * (before + n), device).view(b, -1)[:, :before]
        merged = first_numbers(b * (before + m), device).view(b, -1)[:, :before]
        keep = torch.cat([tokens, shifted.keep], dim=1)
        inverse = torch.cat([merged, shifted.inverse], dim=1)
        sizes = torch.cat([ones(b, before, device), shifted.sizes], dim=1)
        return MergePlan(keep, shifted.sources, shifted.targets, inverse, sizes, shifted.weights)

    def within(self, start: Tensor, total: int) -> MergePlan:
        """Return the plan for sequences of ``total`` tokens that contain the n tokens of this plan in a row.

        ``start`` ``[b]`` is the index of the first of the n tokens in the sequence of each image.
        """
        b, n = self.inverse.shape
        start = start.unsqueeze(1)
        inner = self.in_images().shifted(start, total - n)
        # In the merged sequence, the tokens outside the n come first, and then the merged ones.
        others = torch.arange(total - n, device=start.device).expand(b, -1)
        behind = others >= start
        beside = others + n * behind
        inverse = torch.empty(b, total, dtype=torch.int64, device=start.device).scatter(
            1,
            torch.cat([beside, start + torch.arange(n, device=start.device)], dim=1),
            torch.cat([others, inner.inverse], dim=1),
        )
        keep = torch.cat([beside, inner.keep], dim=1)
        sizes = torch.cat([torch.ones_like(others, dtype=inner.sizes.dtype), inner.sizes], dim=1)
        return MergePlan(keep, inner.sources, inner.targets, inverse, sizes, inner.weights).in_batch()


# A plan of either kind: each token merges into one other, or is shared out over several.
Plan: TypeAlias = MergePlan | SoftPlan


def make_plan(
    src: Tensor, dst: Tensor, order: Tensor, nearest: Tensor, r: int, weights: Tensor | None = None
) -> MergePlan:
    """Return a plan that merges the r sources with the best edges and leaves all other tokens alone.

    Args:
        src: ``[s]`` or ``[b, s]`` indices of the sources, for all images or for each.
        dst: ``[d]`` or ``[b, d]`` indices of the destinations.
        order: ``[b, s]`` positions in ``src``, the best edge first.
        nearest: ``[b, s]`` for each source the position in ``dst`` of its destination.
        r: number of tokens to remove, 0 ≤ r ≤ s.
        weights: ``[b, s]`` 1 for a source that counts in a mean, 0 for one that is dropped, or None if all
            count.
    """
    b, s = order.shape
    device = order.device
    best = order[:, :r]
    n = s + dst.shape[-1]
    rows = once(src, ("rows", b), lambda: with_destinations(src, dst) + first_rows(b, n, 0, device), dst)
    targets = nearest.gather(1, best) + first_rows(b, n - r, s - r, device)
    return plan_of_rows(rows, order, targets, None if weights is None else weights.gather(1, best))


def plan_of_rows(rows: Tensor, order: Tensor, targets: Tensor, weights: Tensor | None = None) -> MergePlan:
    """Return the plan that merges the first r sources of an order ``[b, s]`` into ``targets`` ``[b, r]``.

    ``rows`` ``[b, n]`` are those of the sources of each image, then those of its destinations. ``targets``
    are merged rows, and ``weights`` ``[b, r]`` are those of the tokens that merge, or None if all count.
    """
    b, n = rows.shape
    s = order.shape[1]
    r = targets.shape[1]
    device = rows.device
    m = n - r
    # These are the tokens that merge, those left alone, and the destinations. The last two are the merged
    # sequence.
    tokens = torch.cat([rows[:, :s].gather(1, order), rows[:, s:]], dim=1)
    merged = torch.cat([targets, first_numbers(b * m, device).view(b, m)], dim=1)
    inverse = torch.empty(b * n, dtype=torch.int64, device=device).scatter(
        0, tokens.view(-1), merged.view(-1)
    )
    every = ones(1, b * n, device)
    counts = every[:, : b * r] if weights is None else weights.view(1, -1)
    sizes = every[:, : b * m].scatter_add(1, targets.view(1, -1), counts).view(b, m)
    return MergePlan(tokens[:, r:], tokens[:, :r], targets, inverse.view(b, n), sizes, weights)


def join_plans(plans: Sequence[Plan | None], lengths: Sequence[int]) -> Plan:
    """Join plans of one kind for n₁, n₂, … tokens of the same images into one for n₁ + n₂ + … tokens.

    Each run of tokens merges by its own plan. None leaves a run alone; at least one plan is not None.

    >>> one = make_plan(torch.tensor([1]), torch.tensor([0]), *torch.zeros(2, 1, 1, dtype=torch.int64), r=1)
    >>> join_plans([None, one], [3, 2]).labels().tolist()
    [[0, 1, 2, 3, 3]]
    """
    if any(isinstance(plan, SoftPlan) for plan in plans):
        return join_soft([plan if isinstance(plan, SoftPlan) else None for plan in plans], lengths)
    first = next(plan for plan in plans if isinstance(plan, MergePlan))
    none = first.sources[:, :0]
    b = len(first.keep)
    no_weights = None if first.weights is None else first.weights[:, :0]

    n = 0  # tokens of the runs so far
    m = 0  # of which these are left
    runs: list[MergePlan] = []  # with indices that start at 0 in each image
    for plan, length in zip(plans, lengths, strict=True):
        if isinstance(plan, MergePlan):
            part = plan.in_images().shifted(n, m)
        else:
            rows = torch.arange(length, device=none.device).expand(b, -1)
            sizes = torch.ones(b, length, device=none.device)
            part = MergePlan(rows + n, none, none, rows + m, sizes, no_weights)
        runs.append(part)
        n += length
        m += part.keep.shape[1]
    fields: list[Any] = [
        None if values[0] is None else torch.cat(values, dim=1) for values in zip(*runs, strict=True)
    ]
    return MergePlan(*fields).in_batch()


def keep_destinations(plan: Plan, x: Tensor) -> Tensor:
    """Keep the destinations and unmerged tokens, drop the others: ``[b, n, c]`` → ``[b, m, c]``."""
    b, n, c = x.shape
    rows = once(plan.keep, "rows", plan.keep.flatten)
    return x.reshape(b * n, c).index_select(0, rows).view(b, -1, c)
