"""What measurements say."""

from __future__ import annotations

import math

import pytest

from tokenmerge_tools.tune.rounds import Look, estimates, gain


def look(name: str, item: int, value: float, seconds: float = 5.0) -> Look:
    return Look(name, item, seconds, 10.0, value)


def test_a_plan_has_the_median_speed_up_and_the_mean_closeness() -> None:
    found = estimates([look("a", 0, 30.0), look("a", 1, 32.0, 2.0), look("a", 2, 34.0, 1.0)])["a"]
    assert (found.looks, found.speedup, found.value) == (3, 5.0, 32.0)
    assert found.error == pytest.approx(2 / math.sqrt(3))


def test_a_gain_is_of_common_prompts() -> None:
    looks = [
        look("a", 0, 31.0),
        look("a", 1, 35.0),
        look("b", 0, 30.0),
        look("b", 1, 31.0),
        look("b", 2, 90.0),
    ]
    assert gain(looks, "a", "b", "psnr") == pytest.approx((2.5, 1.5))
    assert gain(looks, "a", "b", "lpips") == pytest.approx((-2.5, 1.5))
    assert gain(looks, "a", "c", "psnr") is None
