"""The plans of an exported model, and PyTorch runs that take these plans instead of their own.

Which destination is the most similar one, and which edges are the best, can depend on the last bit. Two
programs that round differently then make different plans, and merging makes their outputs differ. To compare
the outputs, PyTorch takes the plans of the exported model, after checking each of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokenmerge.api import revise_plans
from tokenmerge.errors import ConfigError
from tokenmerge.ops import IndexPlan, Plan


@contextlib.contextmanager
def made_plans(model: nn.Module) -> Iterator[list[Plan]]:
    """Collect, within the context, the plans of a patched model in order; an unpatched one makes none."""
    plans: list[Plan] = []

    def note(_: Tensor, plan: Plan) -> Plan:
        plans.append(plan)
        return plan

    with revise_plans(model, note):
        yield plans


def plan_tensors(plan: Plan) -> tuple[Tensor, ...]:
    """Return the tensors of a plan that consists of indices; empty for a soft plan."""
    return tuple(x for x in plan if x is not None) if isinstance(plan, IndexPlan) else ()


@dataclasses.dataclass
class TakenPlans:
    """Plans that PyTorch takes in place of its own, after comparing the two.

    ``given`` has the tensors of each plan, as from :func:`plan_tensors`; for None, PyTorch's own one is
    taken. ``other_choices`` is the number of tokens that these plans put into other merged tokens than
    PyTorch does, and ``gap`` the largest gap that was found; see :func:`gap`.
    """

    given: Sequence[Sequence[Any | None]]
    largest_gap: float
    done: int = 0
    other_choices: int = 0
    gap: float = 0.0

    @classmethod
    def read(
        cls, names: Sequence[Sequence[str | None]], values: Sequence[Any], largest_gap: float
    ) -> TakenPlans:
        """Read plans from the values of a graph in the order of their names; None: there is no such value."""
        each = iter(values)
        return cls([[name and next(each) for name in plan] for plan in names], largest_gap)

    @contextlib.contextmanager
    def in_use_of(self, model: nn.Module) -> Iterator[None]:
        """Let the patched model take these plans within the context."""
        with revise_plans(model, self._take):
            yield
        if self.done != len(self.given):
            raise _wrong(f"has {len(self.given)} plans, but PyTorch makes {self.done}")

    def _take(self, features: Tensor, own: Plan) -> Plan:
        if self.done == len(self.given):
            raise _wrong(f"has {len(self.given)} plans, but PyTorch makes more")
        given, self.done = self.given[self.done], self.done + 1
        if not isinstance(own, IndexPlan):
            return own
        of_own = plan_tensors(own)
        plan = IndexPlan(
            *(mine if x is None else torch.as_tensor(x) for x, mine in zip(given, of_own, strict=True))
        )
        if (flaw := flaw_of(plan, own)) is not None:
            raise _wrong(f"has a plan in which {flaw}")
        self.other_choices += int((representatives(plan) != representatives(own)).sum())
        self.gap = max(self.gap, gap(features, plan, own))
        if not self.gap <= self.largest_gap:
            raise _wrong(
                f"merges tokens whose similarity is lower than in PyTorch by {self.gap:.1e}, more than "
                f"rounding explains ({self.largest_gap:g})"
            )
        return plan


def flaw_of(plan: IndexPlan, own: IndexPlan) -> str | None:
    """Return what is wrong with a plan that should have the shape of PyTorch's ``own``; None: nothing.

    Every token must be in exactly one merged token, and indices and sizes must agree on which.
    """
    if [(x.shape, x.dtype) for x in plan_tensors(plan)] != [(x.shape, x.dtype) for x in plan_tensors(own)]:
        return "the number of tokens is different"
    (b, n), m = plan.inverse.shape, plan.keep.shape[1]
    image = torch.arange(b).unsqueeze(1)
    for index, rows in ((plan.keep, n), (plan.sources, n), (plan.targets, m), (plan.inverse, m)):
        if not bool((index.div(rows, rounding_mode="floor") == image).all()):
            return "an index is out of range"
    every = torch.cat([plan.keep, plan.sources], dim=1).sort(dim=1).values
    if not torch.equal(every, torch.arange(b * n).view(b, n)):
        return "a token is missing"
    into = plan.inverse.flatten()
    if not (
        torch.equal(into[plan.keep], torch.arange(b * m).view(b, m))
        and torch.equal(into[plan.sources], plan.targets)
    ):
        return "a token goes into one merged token and comes back from another"
    counts = torch.ones_like(plan.sources, dtype=plan.sizes.dtype) if plan.weights is None else plan.weights
    sizes = torch.ones(b * m, dtype=plan.sizes.dtype).index_add(0, plan.targets.flatten(), counts.flatten())
    if not torch.equal(sizes, plan.sizes.flatten()):
        return "the sizes are not those of its merged tokens"
    return None


def representatives(plan: IndexPlan) -> Tensor:
    """Return for each token ``[b, n]`` the index of the token whose place its merged token takes."""
    return plan.kept().gather(1, plan.labels())


def gap(features: Tensor, plan: IndexPlan, own: IndexPlan) -> float:
    """Return the largest amount by which similarities of merged tokens are lower than in PyTorch's own plan.

    The similarities of all tokens to the tokens that they merge into are compared in order, the lowest of one
    plan with the lowest of the other. PyTorch's plan has the best edges, so no other plan has higher ones.
    Images with the same plan share it, and their similarities are averaged as the planner does.
    """
    unit = F.normalize(features.double(), dim=-1)
    _, group = own.labels().unique(dim=0, return_inverse=True)

    def ordered(plan: IndexPlan) -> Tensor:
        other = representatives(plan).unsqueeze(-1).expand_as(unit)
        similar = (unit * unit.gather(1, other)).sum(dim=-1)
        total = similar.new_zeros(int(group.max()) + 1, similar.shape[1]).index_add(0, group, similar)
        return (total / group.bincount().unsqueeze(1)).sort(dim=1).values

    return float((ordered(own) - ordered(plan)).max())


def _wrong(what: str) -> ConfigError:
    return ConfigError(f"to: the exported model {what}, so no files were kept; take another format or method")
