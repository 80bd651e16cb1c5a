"""Where the complete steps of a generation lie."""

from __future__ import annotations

import bisect
from collections.abc import Sequence


def later_ones(steps: int, count: int, spacing: float) -> tuple[int, ...]:
    """Return ``count`` ≥ 3 steps: the first two, the last, and others that lie closer towards the end.

    Places are powers with the exponent ``spacing``, 0 < spacing ≤ 1; 1: equal distances.

    >>> later_ones(20, 6, 1.0), later_ones(20, 6, 0.6)
    ((0, 1, 5, 10, 15, 19), (0, 1, 9, 13, 16, 19))
    """
    after = count - 2
    return 0, 1, *_distinct([1 + round((steps - 2) * (i / after) ** spacing) for i in range(1, after + 1)], 2)


def without_the_last(steps: int, count: int, tail: float) -> tuple[int, ...]:
    """Return ``count`` ≥ 3 steps at equal distances, from the first one to one before the last.

    ``tail`` is what is left after the last of them, as a share of a distance.

    >>> without_the_last(20, 8, 0.6), without_the_last(4, 3, 0.6)
    ((0, 2, 5, 7, 10, 12, 15, 17), (0, 1, 2))
    """
    distances = count - 1
    end = steps - 1 - max(1, round(tail * (steps - 1) / distances))
    return 0, *_distinct([round(end * i / distances) for i in range(1, count)], 1)


def nearest(places: Sequence[int], among: Sequence[int]) -> tuple[int, ...]:
    """Return of some ascending steps those that are nearest to ``places``, a different one for each.

    >>> nearest((0, 1, 6, 9), (0, 1, 4, 5, 9))
    (0, 1, 5, 9)
    """
    chosen = []
    for place in places:
        right = min(bisect.bisect_left(among, place), len(among) - 1)
        left = max(0, right - 1)
        chosen.append(left if place - among[left] <= among[right] - place else right)
    return tuple(among[i] for i in _distinct(chosen, 0))


def _distinct(numbers: list[int], first: int) -> list[int]:
    """Make ascending numbers distinct and at least ``first``, keeping the last one where there is room."""
    for i in reversed(range(len(numbers) - 1)):
        numbers[i] = min(numbers[i], numbers[i + 1] - 1)
    return [max(number, first + i) for i, number in enumerate(numbers)]
