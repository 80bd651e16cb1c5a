"""The search on stubs: plans whose closeness is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from random import Random

import pytest

from tokenmerge_tools.tune.search import search

PROMPTS = 4


def near(plan: int, random: Random) -> Iterator[int]:
    """Numbers at most 5 away, those twice."""
    for _ in range(20):
        yield plan + random.randint(-5, 5)


def peak(plan: int, prompt: int) -> float:
    return 40.0 + prompt - abs(plan - 30)


def test_the_best_plan_is_found_and_the_search_ends() -> None:
    found = list(search([0, 4], near, peak, PROMPTS))
    assert found[0] == 4
    assert found[-1] == 30
    assert len(found) < 60
    assert [peak(plan, 0) for plan in found] == sorted(peak(plan, 0) for plan in found)


def test_of_a_round_the_better_half_goes_on() -> None:
    drawn: Counter[int] = Counter()

    def closeness(plan: int, prompt: int) -> float:
        drawn[plan] += 1
        return float(plan)

    next(search([0, 1, 2, 3, 4, -1], near, closeness, PROMPTS))
    # A plan is looked at once for each prompt of each stage: 1, then 2, then 4.
    assert drawn == {0: drawn[0], -1: 1, 1: 1, 2: 1, 3: 1 + 2, 4: 1 + 2 + 4}


def test_a_plan_that_is_closer_on_some_prompts_only_is_not_the_best() -> None:
    def closeness(plan: int, prompt: int) -> float:
        return 30.0 if plan == 0 else (31.0, 31.0, 31.0, 20.0)[prompt]

    assert set(search([0, 1], near, closeness, PROMPTS)) == {0}


@pytest.mark.parametrize(("gains", "found"), [((0.1, 0.1, 0.1, 4.0), 0), ((0.5, 1.5, 1.0, 2.0), 1)])
def test_a_plan_that_may_be_ahead_by_luck_is_not_the_best(gains: tuple[float, ...], found: int) -> None:
    """It has to be ahead by twice the standard error."""

    def closeness(plan: int, prompt: int) -> float:
        return 30.0 + plan * gains[prompt]

    assert list(search([0, 1], lambda plan, random: (), closeness, PROMPTS)) == [found]


def test_no_plan_is_measured_twice_by_a_second_search() -> None:
    known: dict[tuple[int, int], float] = {}

    def closeness(plan: int, prompt: int) -> float:
        if (plan, prompt) not in known:
            assert len(known) < limit, "the second search measures something new"
            known[plan, prompt] = peak(plan, prompt)
        return known[plan, prompt]

    limit = 10**6
    first = list(search([0], near, closeness, PROMPTS))
    limit = len(known)
    assert list(search([0], near, closeness, PROMPTS)) == first


def test_without_neighbours_the_first_round_is_the_last() -> None:
    assert list(search([0, 1], lambda plan, random: (), peak, PROMPTS)) == [1]


@pytest.mark.parametrize("prompts", [1, 2, 3])
def test_few_prompts_are_enough(prompts: int) -> None:
    *_, last = islice(search([20], near, peak, prompts), 40)
    assert last == 30
