"""Searches plans of one speed for the one that stays closest to dense, by successive halving over prompts.

In a round, some neighbours of the best plan so far draw one prompt. The better half of those that are ahead
of it draws a second one, half of these the next two, and so on (Jamieson and Talwalkar 2016, arXiv
1502.07943). One that is ahead on all prompts, by twice the standard error, is the best plan of the next
round. Less can be luck: of many plans, some are ahead on a few prompts. The order of the prompts differs from
round to round, so that no prompt decides alone. The search is a function of the closeness of each plan on
each prompt: with records of these, it continues where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from statistics import fmean, stdev
from typing import TypeVar

Plan = TypeVar("Plan")
_TOGETHER = 6  # plans of a round
_PATIENCE = 15  # rounds without a better plan after which the search ends
_ERRORS = 2.0  # standard errors by which a better plan is ahead


def search(
    begin: Sequence[Plan],
    near: Callable[[Plan, Random], Iterable[Plan]],
    closeness: Callable[[Plan, int], float],
    prompts: int,
) -> Iterator[Plan]:
    """Yield the best plan so far, after each round, until many rounds find no better one.

    Args:
        begin: the plans to begin with; the first is the one to beat.
        near: yields the neighbours of a plan, which are drawn at random.
        closeness: returns how close a plan is on a prompt, in dB.
        prompts: number of prompts.
    """
    random = Random(0)
    best = begin[0]
    tried = set(begin)
    others = list(begin[1:])
    rounds = 0
    while rounds < _PATIENCE:
        order = list(range(prompts))
        random.shuffle(order)
        found = _beaten(best, others, closeness, order)
        rounds = rounds + 1 if found == best else 0
        best = found
        yield best
        others = []
        for plan in near(best, random):
            if plan not in tried:
                tried.add(plan)
                others.append(plan)
            if len(others) == _TOGETHER:
                break
        if not others:
            return


def _beaten(
    best: Plan, others: Sequence[Plan], closeness: Callable[[Plan, int], float], order: Sequence[int]
) -> Plan:
    """Return the plan that beats the best one clearly on all prompts, or the best one."""
    count = 1
    alive = list(others)
    while alive:
        gains = {plan: [closeness(plan, i) - closeness(best, i) for i in order[:count]] for plan in alive}
        errors = _ERRORS if count == len(order) else 0.0
        ahead = [plan for plan in alive if _is_ahead(gains[plan], errors)]
        ahead.sort(key=lambda plan: -fmean(gains[plan]))
        if count == len(order):
            return ahead[0] if ahead else best
        alive = ahead[: max(1, len(alive) // 2)]
        count = min(2 * count, len(order))
    return best


def _is_ahead(gains: Sequence[float], errors: float) -> bool:
    """Return whether the mean gain is above 0, by some standard errors where there are several gains."""
    mean = fmean(gains)
    if mean <= 0 or errors == 0 or len(gains) == 1:
        return mean > 0
    return mean > errors * stdev(gains) / math.sqrt(len(gains))
