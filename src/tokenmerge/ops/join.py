"""One plan for several runs of tokens that stand in a row, such as the pictures of a sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenmerge.ops.plan import IndexPlan, Plan
from tokenmerge.ops.soft import SoftPlan, join_soft


def join_plans(plans: Sequence[Plan | None], lengths: Sequence[int]) -> Plan:
    """Join plans for n₁, n₂, … tokens of the same images into one for n₁ + n₂ + … tokens.

    Merging with it merges each run by its own plan.

    Args:
        plans: one for each run, all of one kind. None leaves the tokens of a run alone. At least one is not
            None.
        lengths: n₁, n₂, …

    >>> from tokenmerge.ops import make_plan
    >>> one = make_plan(torch.tensor([1]), torch.tensor([0]), *torch.zeros(2, 1, 1, dtype=torch.int64), r=1)
    >>> join_plans([None, one], [3, 2]).labels().tolist()
    [[0, 1, 2, 3, 3]]
    """
    if any(isinstance(plan, SoftPlan) for plan in plans):
        return join_soft([plan if isinstance(plan, SoftPlan) else None for plan in plans], lengths)
    first = next(plan for plan in plans if isinstance(plan, IndexPlan))
    b, weighted = len(first.keep), any(getattr(plan, "weights", None) is not None for plan in plans)

    n = m = 0
    runs: list[IndexPlan] = []  # with indices that start at 0 in each image
    for plan, length in zip(plans, lengths, strict=True):
        own = plan if isinstance(plan, IndexPlan) else _leaving_alone(b, length, first)
        weights = torch.ones_like(own.sources, dtype=own.sizes.dtype) if own.weights is None else own.weights
        left = own.keep.shape[1]
        runs.append(
            IndexPlan(
                keep=own.kept() + n,
                sources=own.sources % length + n,
                targets=own.targets % left + m,
                inverse=own.labels() + m,
                sizes=own.sizes,
                weights=weights,
            )
        )
        n, m = n + length, m + left
    keep, sources, targets, inverse, sizes, weights = (
        torch.cat(values, dim=1) for values in zip(*runs, strict=True)
    )
    return IndexPlan(keep, sources, targets, inverse, sizes, weights if weighted else None).in_batch()


def _leaving_alone(b: int, n: int, like: IndexPlan) -> IndexPlan:
    """Return the plan that removes none of n tokens."""
    none = like.sources[:, :0]
    rows = torch.arange(b * n, device=like.keep.device).view(b, n)
    return IndexPlan(rows, none, none, rows, torch.ones(b, n, device=like.keep.device))
