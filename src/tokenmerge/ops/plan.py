"""A plan: the indices of one merge, computed once and used to merge, to unmerge and to draw."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Plan", "keep_destinations", "make_plan", "merge", "merge_with_norm", "unmerge"]


class Plan(NamedTuple):
    """Which of n tokens become which of m = n − r merged tokens, for each of b images.

    Indices point into the rows of ``[b * n, c]`` or ``[b * m, c]``: selecting whole rows is many times
    faster than a gather with an index per element.

    Attributes:
        keep: ``[b, m]`` row of the token that each merged token starts from and whose place it takes.
        sources: ``[b, r]`` rows of the tokens that merge into another one.
        targets: ``[b, r]`` merged rows that these go to.
        inverse: ``[b, n]`` merged row that holds each original token.
        sizes: ``[b, m]`` number of original tokens in each merged one, as float32.
    """

    keep: Tensor
    sources: Tensor
    targets: Tensor
    inverse: Tensor
    sizes: Tensor

    def labels(self) -> Tensor:
        """``[b, n]``: for each token the merged token, 0 … m−1, that stands for it in its image."""
        return self.inverse % self.keep.shape[1]

    def kept(self) -> Tensor:
        """``[b, m]``: for each merged token the index, 0 … n−1, of the token whose place it takes."""
        return self.keep % self.inverse.shape[1]

    def joined(self, parts: int) -> Plan:
        """The plan for b / ``parts`` images, each made of ``parts`` in a row: frames of a video."""
        return Plan(*(rows.reshape(rows.shape[0] // parts, -1) for rows in self))

    def repeated(self, times: int) -> Plan:
        """The plan for ``times`` · b images: b that merge as this plan says, then b more, and so on."""
        b, m = self.keep.shape
        before = torch.arange(times, device=self.keep.device).repeat_interleave(b).unsqueeze(1) * b
        n_before, m_before = before * self.inverse.shape[1], before * m
        keep, sources, targets, inverse, sizes = (rows.repeat(times, 1) for rows in self)
        return Plan(keep + n_before, sources + n_before, targets + m_before, inverse + m_before, sizes)

    def within(self, start: Tensor, total: int) -> Plan:
        """The plan for sequences of ``total`` tokens of which only n in a row merge, as this plan says.

        Args:
            start: ``[b]`` index of the first of these in the sequence of each image.
            total: at least start + n.
        """
        (b, m), n = self.keep.shape, self.inverse.shape[1]
        start, image = start.unsqueeze(1), torch.arange(b, device=start.device).unsqueeze(1)
        # Merged sequence: the tokens beside the n, then the merged ones.
        others = torch.arange(total - n, device=start.device).expand(b, -1)
        beside = others + n * (others >= start)
        rows, merged_rows = image * total, image * (total - n + m)
        inverse = torch.empty(b, total, dtype=torch.int64, device=start.device).scatter(
            1,
            torch.cat([beside, start + torch.arange(n, device=start.device)], dim=1),
            torch.cat([others, self.labels() + (total - n)], dim=1),
        )
        return Plan(
            keep=torch.cat([beside, self.kept() + start], dim=1) + rows,
            sources=self.sources % n + start + rows,
            targets=self.targets % m + (total - n) + merged_rows,
            inverse=inverse + merged_rows,
            sizes=torch.cat([torch.ones_like(others, dtype=self.sizes.dtype), self.sizes], dim=1),
        )


def make_plan(src: Tensor, dst: Tensor, order: Tensor, nearest: Tensor, r: int) -> Plan:
    """Merge the r sources with the best edges, leave all other tokens alone.

    Args:
        src: ``[s]`` indices of the sources.
        dst: ``[d]`` indices of the destinations.
        order: ``[b, s]`` positions in ``src``, the best edge first.
        nearest: ``[b, s]`` for each source the position in ``dst`` of its destination.
        r: number of tokens to remove, 0 ≤ r ≤ s.
    """
    b, s = order.shape
    n, m = s + dst.shape[0], s + dst.shape[0] - r
    merged, alone = order[:, :r], order[:, r:]

    # Merged sequence: the sources left alone, then the destinations.
    keep = torch.cat([src[alone], dst.expand(b, -1)], dim=1)
    sources = src[merged]
    targets = nearest.gather(1, merged) + (s - r)
    inverse = torch.empty(b, n, dtype=torch.int64, device=src.device).scatter(
        1,
        torch.cat([keep, sources], dim=1),
        torch.cat([torch.arange(m, device=src.device).expand(b, -1), targets], dim=1),
    )
    sizes = torch.ones(b, m, device=src.device).scatter_add(1, targets, torch.ones(b, r, device=src.device))

    image = torch.arange(b, device=src.device).unsqueeze(1)
    return Plan(keep + image * n, sources + image * n, targets + image * m, inverse + image * m, sizes)


def merge(plan: Plan, x: Tensor) -> Tensor:
    """Replace merged tokens by their mean: ``[b, n, c]`` → ``[b, m, c]``, differentiable.

    Half-precision tokens are summed in float32: a group can hold thousands of them.
    """
    b, n, c = x.shape
    rows = x.reshape(b * n, c)
    exact = torch.promote_types(x.dtype, torch.float32)
    total = rows.index_select(0, plan.keep.flatten()).to(exact)
    total.index_add_(0, plan.targets.flatten(), rows.index_select(0, plan.sources.flatten()).to(exact))
    total.div_(plan.sizes.view(-1, 1))
    return total.to(x.dtype).view(b, -1, c)


def keep_destinations(plan: Plan, x: Tensor) -> Tensor:
    """Keep the tokens whose place merged ones take, and drop the others: ``[b, n, c]`` → ``[b, m, c]``."""
    b, n, c = x.shape
    return x.reshape(b * n, c).index_select(0, plan.keep.flatten()).view(b, -1, c)


def merge_with_norm(plan: Plan, x: Tensor) -> Tensor:
    """As :func:`merge`, scaled to the longest of the tokens that a merged one stands for (arXiv 2312.01026).

    The mean of vectors is shorter than they are, the more so the less alike they are.
    """
    b, n, _ = x.shape
    mean = merge(plan, x).to(torch.promote_types(x.dtype, torch.float32))
    norms = x.to(mean.dtype).norm(dim=-1).view(b * n)
    longest = norms.index_select(0, plan.keep.flatten()).scatter_reduce(
        0, plan.targets.flatten(), norms.index_select(0, plan.sources.flatten()), "amax"
    )
    length = mean.norm(dim=-1, keepdim=True)
    # A mean of zeros has no direction to be made longer in.
    scale = torch.where(length > 0, longest.view(b, -1, 1) / length, 0)
    return (mean * scale).to(x.dtype)


def unmerge(plan: Plan, y: Tensor) -> Tensor:
    """Give each token the result of the merged token that holds it: ``[b, m, c]`` → ``[b, n, c]``."""
    b, m, c = y.shape
    return y.reshape(b * m, c).index_select(0, plan.inverse.flatten()).view(b, -1, c)
