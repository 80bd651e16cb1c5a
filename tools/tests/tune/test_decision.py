from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmerge_tools.tune.decision import decide, misses
from tokenmerge_tools.tune.goal import Goal
from tokenmerge_tools.tune.measurements import Look, estimates, paired

FAST = Goal("psnr", speedup=1.5)
CLOSE = Goal("psnr", value=35.0)
NAMES = ("a", "b", "c", "auto")


def looks(name: str, speedups: list[float], closeness: list[float]) -> list[Look]:
    return [
        Look(name, item, 10.0 / speedup, 10.0, close)
        for item, (speedup, close) in enumerate(zip(speedups, closeness, strict=True))
    ]


measured = st.lists(
    st.builds(
        Look,
        name=st.sampled_from(NAMES),
        item=st.integers(0, 5),
        seconds=st.floats(1.0, 20.0),
        dense_seconds=st.floats(9.0, 11.0),
        closeness=st.floats(10.0, 60.0),
    ),
    min_size=1,
    max_size=24,
    unique_by=lambda look: (look.name, look.item),
)
goals = st.one_of(
    st.builds(Goal, st.just("psnr"), speedup=st.floats(1.1, 5.0)),
    st.builds(Goal, st.just("psnr"), value=st.floats(10.0, 60.0)),
)


@given(measured, goals)
def test_what_is_chosen_reaches_the_goal_if_anything_does(found: list[Look], goal: Goal) -> None:
    decision = decide(found, goal, {"auto"})
    of = estimates(found)
    assert decision.reached == any(not misses(one, goal) for one in of.values())
    assert misses(of[decision.name], goal) != decision.reached
    assert decision.sure == any(not misses(one, goal, errors=1) for one in of.values())
    assert misses(of[decision.name], goal, errors=1) != decision.sure


@given(measured, goals)
def test_nothing_that_surely_reaches_the_goal_is_better_by_more_than_the_noise(
    found: list[Look], goal: Goal
) -> None:
    decision = decide(found, goal, {"auto"})
    if not decision.sure:
        return
    wants_speed = goal.speedup is not None
    of = estimates(found)
    sure = [one for one in of.values() if not misses(one, goal, errors=1)]
    best = max(sure, key=lambda one: one.objectives(wants_speed)[2])
    own, other = ([look for look in found if look.name == name] for name in (best.name, decision.name))
    gap, error = paired(own, other, wants_speed)
    assert best.name == decision.name or gap <= error


@given(measured, goals, st.floats(0.1, 10.0))
def test_a_machine_of_another_speed_decides_the_same(found: list[Look], goal: Goal, factor: float) -> None:
    other = [
        Look(look.name, look.item, look.seconds * factor, look.dense_seconds * factor, look.closeness)
        for look in found
    ]
    ratio = max(abs(a.log_speedup - b.log_speedup) for a, b in zip(found, other, strict=True))
    assert ratio < 1e-12  # a product and a quotient of doubles differ by a few units in the last place
    one, two = estimates(found), estimates(other)
    if all(misses(one[n], goal, e) == misses(two[n], goal, e) for n in one for e in (0, 1)):
        assert decide(found, goal).reached == decide(other, goal).reached


@given(measured, goals)
def test_the_order_of_the_measurements_does_not_matter_for_reaching(found: list[Look], goal: Goal) -> None:
    one, other = decide(found, goal), decide(found[::-1], goal)
    assert (one.reached, one.sure) == (other.reached, other.sure)


def test_closer_by_less_than_the_noise_is_not_preferred() -> None:
    noisy = [41.0, 39.0, 43.0, 37.2]  # 0.05 dB better on average, ± 1.25 dB
    found = looks("b", [1.6, 1.61, 1.59, 1.6], noisy) + looks("auto", [1.7, 1.71, 1.69, 1.7], [40.0] * 4)
    assert decide(found, FAST).name == "auto"  # it is faster
    assert decide(found, FAST).ties == ("b",)
    slower = looks("b", [1.9, 1.91, 1.89, 1.9], noisy) + looks("auto", [1.7, 1.71, 1.69, 1.7], [40.0] * 4)
    assert decide(slower, FAST).name == "b"
    assert decide(slower, FAST, {"auto"}).name == "auto"  # a tie goes to the preferred one


def test_closer_by_more_than_the_noise_is_preferred() -> None:
    found = looks("b", [1.6, 1.61, 1.59], [43.0, 44.1, 45.0])
    found += looks("auto", [1.7, 1.71, 1.69], [40.0, 41.0, 42.0])
    assert decide(found, FAST, {"auto"}).name == "b"


def test_closer_by_two_standard_errors_is_no_tie() -> None:
    # Differences of 1, 2 and 3 dB: 2 ± 0.58.
    found = looks("b", [1.6, 1.61, 1.59], [41.0, 43.0, 45.0])
    found += looks("auto", [1.7, 1.71, 1.69], [40.0, 41.0, 42.0])
    decision = decide(found, FAST, {"auto"})
    assert (decision.name, decision.ties) == ("b", ())


def test_a_wanted_closeness_takes_the_fastest() -> None:
    found = looks("a", [2.0, 2.02, 1.98], [36.0, 36.5, 37.0])
    found += looks("b", [3.0, 3.02, 2.98], [33.0, 34.0, 35.0])
    found += looks("c", [1.5, 1.52, 1.48], [50.0, 51.0, 52.0])
    decision = decide(found, CLOSE)
    assert (decision.name, decision.reached, decision.sure) == ("a", True, True)


def test_the_goal_has_to_be_reached_by_a_standard_error() -> None:
    barely = looks("a", [1.45, 1.51, 1.58], [45.0, 46.0, 47.0])
    clear = looks("b", [1.7, 1.71, 1.72], [40.0, 41.0, 42.0])
    assert not misses(estimates(barely)["a"], FAST)
    assert decide(barely + clear, FAST).name == "b"
    alone = decide(barely, FAST)
    assert (alone.name, alone.reached, alone.sure) == ("a", True, False)


def test_without_a_setting_that_reaches_the_goal_the_nearest_is_the_result() -> None:
    found = looks("a", [1.2, 1.2], [50.0, 51.0]) + looks("b", [1.3, 1.3], [20.0, 21.0])
    decision = decide(found, FAST)
    assert (decision.name, decision.reached) == ("b", False)
    decision = decide(found, Goal("psnr", value=60.0))
    assert (decision.name, decision.reached) == ("a", False)


def test_for_lpips_smaller_is_closer() -> None:
    goal = Goal("lpips", value=0.1)
    found = looks("a", [1.5, 1.51], [goal.closeness(v) for v in (0.05, 0.06)])
    found += looks("b", [3.0, 3.01], [goal.closeness(v) for v in (0.2, 0.3)])
    assert decide(found, goal).name == "a"


def test_one_picture_is_never_sure() -> None:
    (one,) = estimates(looks("a", [2.0], [40.0])).values()
    assert one.closeness_error == math.inf
    assert misses(one, CLOSE, errors=1)
    assert not misses(one, CLOSE)
    assert misses(one, FAST, errors=1)
    assert not misses(one, FAST)


def test_a_setting_that_saves_nothing_reaches_no_goal() -> None:
    slower = looks("a", [0.99, 0.98], [90.0, 91.0])
    assert not decide(slower, CLOSE).reached
    assert decide(slower + looks("b", [1.2, 1.21], [36.0, 36.1]), CLOSE).name == "b"


def test_the_noise_of_timing_is_pooled_over_settings() -> None:
    found = estimates(looks("a", [1.0, math.exp(0.2)], [40.0, 41.0]) + looks("b", [2.0], [30.0]))
    # Two values that differ by 0.2 have a standard deviation of 0.2 / √2. It also holds for the value of b.
    assert found["b"].speedup_error == pytest.approx(2.0 * 0.2 / math.sqrt(2))
    assert found["a"].speedup_error == pytest.approx(math.exp(0.1) * 0.1)


def test_the_error_of_a_difference_is_that_of_its_pairs() -> None:
    one = looks("a", [1.0] * 3, [40.0, 30.0, 20.0])
    other = looks("b", [1.0] * 3, [39.0, 28.0, 17.0])
    gap, error = paired(one, other, wants_speed=True)
    assert gap == pytest.approx(2.0)
    assert error == pytest.approx(1 / math.sqrt(3))  # the differences are 1, 2 and 3
    assert paired(one[:1], other, wants_speed=True)[1] == math.inf
