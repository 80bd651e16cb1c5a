"""Which speeds to draw, and what their closeness says: pure functions of numbers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

from tokenmerge.plans import ROUNDING, RunFacts, plan_for
from tokenmerge.plans.learned import nine_of_ten, nine_of_ten_between
from tokenmerge_tools.records.kinds import LOWER_IS_CLOSER

_LADDER = (1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8, 2.0, 2.2, 2.5, 3.0, 3.5, 4.0)


def speeds_of(facts: RunFacts) -> list[float]:
    """Return the speeds to choose from, ascending. They can be reached, and their plans differ."""
    found = []
    before = None
    for speedup in _LADDER:
        plan = plan_for(facts, speedup)
        if plan.speedup + ROUNDING >= speedup and plan.config != before:
            found.append(speedup)
            before = plan.config
    return found


def fastest(speeds: Sequence[float], keeps: Callable[[float], bool]) -> float | None:
    """Return the highest of some ascending speeds that keeps the closeness, by bisection, or None.

    >>> asked = []
    >>> fastest([1.2, 1.5, 2.0, 3.0], lambda speed: asked.append(speed) or speed < 1.8), asked
    (1.5, [1.5, 2.0])
    """
    low = -1  # the index of the highest speed that keeps the closeness
    high = len(speeds)  # the index of the lowest speed that does not
    while high - low > 1:
        middle = (low + high) // 2
        if keeps(speeds[middle]):
            low = middle
        else:
            high = middle
    return None if low < 0 else speeds[low]


class Closeness(NamedTuple):
    """The closeness at a speed: the mean, the range of 9 of 10 prompts, and what 9 of 10 prompts keep."""

    mean: float
    low: float
    high: float
    kept: float


def closeness_of(values: Sequence[float], metric: str) -> Closeness:
    """Return the closeness to expect of further prompts, from the values of at least two prompts.

    >>> [round(number, 1) for number in closeness_of([34.0, 36.0, 38.0, 36.0], "psnr")]
    [36.0, 31.7, 40.3, 33.0]
    """
    mean = fmean(values)
    spread = statistics.stdev(values)
    freedom = len(values) - 1
    within = nine_of_ten_between(spread, len(values), freedom)
    margin = nine_of_ten(spread, len(values), freedom)
    kept = mean + margin if metric in LOWER_IS_CLOSER else mean - margin
    return Closeness(mean, max(mean - within, 0.0), mean + within, kept)


def is_kept(closeness: Closeness, goal: float, metric: str) -> bool:
    """Return whether 9 of 10 prompts keep the goal."""
    return closeness.kept <= goal if metric in LOWER_IS_CLOSER else closeness.kept >= goal
