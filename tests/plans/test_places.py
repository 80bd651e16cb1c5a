"""The places of full steps."""

from __future__ import annotations

import itertools

import pytest

from tokenmerge.plans.choose import later_ones, nearest, without_the_last

NUMBERS = [(steps, count) for steps in range(4, 31) for count in range(3, steps)]


def is_ascending(places: tuple[int, ...], steps: int) -> bool:
    return list(places) == sorted(set(places)) and places[0] == 0 and places[-1] < steps


@pytest.mark.parametrize("spacing", [1.0, 0.8, 0.5, 0.1])
def test_full_steps_are_as_many_as_asked_for(spacing):
    for steps, count in NUMBERS:
        places = later_ones(steps, count, spacing)
        assert len(places) == count
        assert is_ascending(places, steps)
        assert (places[1], places[-1]) == (1, steps - 1)


def test_full_steps_are_closer_together_towards_the_end():
    distances = [late - early for early, late in itertools.pairwise(later_ones(50, 12, 0.6)[1:])]
    assert all(late <= early + 1 for early, late in itertools.pairwise(distances))  # steps are whole numbers
    assert distances[0] >= 2 * distances[-1]


@pytest.mark.parametrize("tail", [0.1, 0.6, 1.0])
def test_the_last_step_can_be_left_out(tail):
    for steps, count in NUMBERS:
        places = without_the_last(steps, count, tail)
        assert len(places) == count
        assert is_ascending(places, steps)
        assert places[-1] < steps - 1


def test_full_steps_are_some_of_those_that_run_the_finest_level():
    for steps, count in NUMBERS:
        for finest in range(count, steps + 1):
            among = later_ones(steps, finest, 1.0) if finest < steps else tuple(range(steps))
            found = nearest(later_ones(steps, count, 0.8), among)
            assert len(found) == count
            assert set(found) <= set(among)
            assert (found[0], found[-1]) == (0, steps - 1)
