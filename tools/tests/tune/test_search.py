"""The search on stubs: settings whose speed and closeness are known."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmerge_tools.tune.decision import decide
from tokenmerge_tools.tune.goal import Goal
from tokenmerge_tools.tune.measurements import Estimate, Look
from tokenmerge_tools.tune.search import Entry, Round, _close_calls, hopeless, next_round, survivors

GOAL = Goal("psnr", speedup=1.5)
DENSE = 10.0


def entry(name: str, **changes: object) -> Entry:
    return Entry(**{"name": name, "family": name, **changes})


def drawn(
    names: list[str], item: int, truth: Mapping[str, tuple[float, float]], noise: float = 0.0
) -> list[Look]:
    """The looks of a round if settings have these speed-ups and closenesses."""
    random_ = random.Random(item)
    easy = random_.gauss(0, 3)  # an easy prompt is easy for all settings
    return [
        Look(
            name,
            item,
            DENSE / truth[name][0] * (1 + noise * random_.uniform(-1, 1)),
            DENSE,
            truth[name][1] + easy + random_.gauss(0, 10 * noise),
            cost=DENSE / truth[name][0] + DENSE / len(names),
        )
        for name in names
    ]


def run(
    entries: list[Entry],
    truth: Mapping[str, tuple[float, float]],
    goal: Goal = GOAL,
    budget: float = 1e9,
    looks: list[Look] | None = None,
    stop: Callable[[list[Look]], bool] = lambda looks: False,
    counted: Mapping[str, float] | None = None,
    noise: float = 0.02,
) -> list[Look]:
    found = list(looks or [])
    while not stop(found):
        following = next_round(entries, found, goal, budget, 8, counted or {})
        if following is None:
            break
        found += drawn(list(following.names), following.item, truth, noise)
    return found


# (speed-up, closeness) of 24 settings on a curve, and of 6 below it.
TRUTH = {f"s{i}": (1.1 + 0.1 * i, 60.0 - 1.5 * i) for i in range(24)} | {
    f"bad{i}": (1.2 + 0.3 * i, 25.0 - i) for i in range(6)
}
ENTRIES = [entry(name) for name in sorted(TRUTH, key=lambda name: -TRUTH[name][0])]


def test_the_best_setting_is_found_with_few_pictures() -> None:
    found = run(ENTRIES, TRUTH)
    # s4 has a speed-up of 1.5, which timing noise of 2 % may hide. s5 has 1.6, and 1.5 dB less.
    assert decide(found, GOAL).name in ("s4", "s5")
    everything = len(ENTRIES) * 8
    assert len(found) < everything / 2.5
    assert {look.name for look in found} == set(TRUTH)


def test_the_fastest_setting_at_a_closeness_is_found() -> None:
    goal = Goal("psnr", value=45.0)
    decision = decide(run(ENTRIES, TRUTH, goal), goal)
    # s10 has 45 dB, and neighbours differ by 1.5 dB. The mean of eight prompts is off by 3 / √8 = 1.06 dB.
    assert decision.name in ("s7", "s8", "s9", "s10", "s11")
    assert decision.reached


def test_bad_settings_are_dropped_after_one_prompt() -> None:
    found = run(ENTRIES, TRUTH)
    assert all(look.item == 0 for look in found if look.name.startswith("bad"))


def test_every_round_times_dense_beside_few_settings() -> None:
    assert len(next_round(ENTRIES, drawn(["s1"], 0, TRUTH), GOAL, 1e9, 8, {}).names) == 6


@given(st.integers(0, 60))
def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(after: int) -> None:
    whole = run(ENTRIES, TRUTH, budget=900.0)
    begun = run(ENTRIES, TRUTH, budget=900.0, stop=lambda looks: len(looks) >= after)
    assert run(ENTRIES, TRUTH, budget=900.0, looks=begun) == whole


@pytest.mark.parametrize("noise", [0.1, 0.3, 0.6])
def test_later_prompts_do_not_change_what_was_kept_after_earlier_ones(noise: float) -> None:
    items = [look.item for look in run(ENTRIES, TRUTH, noise=noise)]
    assert items == sorted(items)
    assert items[-1] == 7


def test_a_round_that_was_interrupted_is_completed() -> None:
    begun = run(ENTRIES, TRUTH, stop=lambda looks: any(look.item == 1 for look in looks))
    again = begun[:-1]
    following = next_round(ENTRIES, again, GOAL, 1e9, 8, {})
    assert following == Round(1, (begun[-1].name,))


@given(st.floats(1.0, 2000.0))
def test_the_budget_holds(budget: float) -> None:
    found = run(ENTRIES, TRUTH, budget=budget, noise=0.0)
    assert found
    spent = sum(look.cost for look in found)
    first = found[0].cost
    assert spent <= max(budget, first) + 1e-6


def test_a_larger_budget_searches_on() -> None:
    short = run(ENTRIES, TRUTH, budget=150.0)
    longer = run(ENTRIES, TRUTH, budget=600.0, looks=short)
    assert longer[: len(short)] == short
    assert len(longer) > len(short)


def test_half_of_the_time_is_left_for_comparing() -> None:
    found = run(ENTRIES, TRUTH, budget=200.0)
    first = sum(look.cost for look in found if look.item == 0)
    assert first < 150.0
    assert max(look.item for look in found) >= 2


def test_counted_operations_skip_what_is_too_slow() -> None:
    counted = {name: speedup for name, (speedup, _) in TRUTH.items()}
    found = run(ENTRIES, TRUTH, counted=counted)
    assert "s0" not in {look.name for look in found}  # counted at 1.1, and 1.1 · 1.25 < 1.5
    assert "s2" in {look.name for look in found}  # counted at 1.3
    assert hopeless(entry("x"), [], [], GOAL, {"x": 1.0})
    assert not hopeless(entry("x"), [], [], GOAL, {"x": 1.3})


def test_a_weaker_setting_of_a_family_that_is_too_slow_is_skipped() -> None:
    weak, strong = entry("weak", family="f", strength=0.2), entry("strong", family="f", strength=0.4)
    other = entry("other", family="g", strength=0.1)
    slow = drawn(["strong"], 0, {"strong": (1.2, 50.0)})
    assert hopeless(weak, [weak, strong, other], slow, GOAL, {})
    assert not hopeless(other, [weak, strong, other], slow, GOAL, {})
    fast = drawn(["strong"], 0, {"strong": (1.4, 50.0)})  # may be 1.5 within the noise of one timing
    assert not hopeless(weak, [weak, strong, other], fast, GOAL, {})


def test_for_a_closeness_slower_settings_than_two_that_reach_it_are_skipped() -> None:
    goal = Goal("psnr", value=30.0)
    family = [entry(str(r), family="f", strength=r) for r in (0.2, 0.4, 0.6)]
    truth = {"0.6": (3.0, 45.0), "0.4": (2.0, 50.0)}
    assert not hopeless(family[0], family, drawn(["0.6"], 0, truth), goal, {})
    assert hopeless(family[0], family, drawn(["0.6", "0.4"], 0, truth), goal, {})
    far = {"0.6": (3.0, 10.0), "0.4": (2.0, 12.0)}
    assert not hopeless(family[0], family, drawn(["0.6", "0.4"], 0, far), goal, {})
    assert hopeless(entry("x"), family, drawn(["0.6", "0.4"], 0, truth), goal, {"x": 1.5})


def test_baselines_take_no_place_and_are_never_dropped() -> None:
    rivals = [entry("few", group="fewer-steps", rival=True), entry("cache", group="cache", rival=True)]
    truth = {**TRUTH, "few": (1.3, 10.0), "cache": (1.2, 9.0)}
    looks = drawn(list(truth), 0, truth)
    with_rivals = [one.name for one in survivors([*ENTRIES, *rivals], looks, GOAL)]
    without = [one.name for one in survivors(ENTRIES, looks, GOAL)]
    assert set(with_rivals) == {*without, "few", "cache"}
    assert len(without) == 10  # a third of 30


def test_baselines_are_measured_even_when_time_is_short() -> None:
    rivals = [
        entry("few", group="fewer-steps", rival=True),
        entry("fewer", group="fewer-steps", rival=True),
        entry("cache", group="cache", rival=True),
    ]
    truth = {**TRUTH, "few": (1.6, 10.0), "fewer": (1.8, 9.0), "cache": (1.7, 9.0)}
    found = run([*ENTRIES, *rivals], truth, budget=120.0)
    looked = {look.name for look in found if look.item == 0}
    assert len(looked) < len(ENTRIES)
    assert "cache" in looked
    assert len({"few", "fewer"} & looked) == 1


@pytest.mark.parametrize("counted", [{}, dict.fromkeys(TRUTH, 1.01)])
def test_a_setting_that_can_be_the_result_is_measured_whatever_it_costs(counted: dict[str, float]) -> None:
    rivals = [entry(f"few{i}", group="fewer-steps", rival=True) for i in range(3)]
    truth = TRUTH | {rival.name: (1.6, 10.0) for rival in rivals}
    entries = [*rivals, *ENTRIES]
    begun = drawn(["few0"], 0, truth)
    for looks in ([], begun):
        found = run(entries, truth, budget=1e-9, looks=looks, counted=counted)
        assert [look.name for look in found[len(looks) :]] == [ENTRIES[0].name]
    assert next_round(rivals, begun, GOAL, 1e-9, 8, {}) is None


def test_the_best_of_auto_stays_for_comparison() -> None:
    entries = [*ENTRIES, entry("auto", group="auto")]
    truth = {**TRUTH, "auto": (1.6, 20.0)}
    assert "auto" in [one.name for one in survivors(entries, drawn(list(truth), 0, truth), GOAL)]


def test_a_few_settings_that_just_miss_the_goal_stay() -> None:
    kept = [one.name for one in survivors(ENTRIES, drawn(list(TRUTH), 0, TRUTH), GOAL)]
    assert "s3" in kept  # 1.4
    assert kept[0] in ("s4", "s5")
    assert sum(TRUTH[name][0] < 1.499 for name in kept) <= len(kept) / 3


@pytest.mark.parametrize("goal", [GOAL, Goal("psnr", value=45.0)])
def test_a_setting_that_is_better_in_both_is_never_dropped_for_a_worse_one(goal: Goal) -> None:
    looks = drawn(list(TRUTH), 0, TRUTH)
    kept = {one.name for one in survivors(ENTRIES, looks, goal)}
    by_name = {look.name: look for look in looks}
    for gone in set(TRUTH) - kept:
        worse = [
            name
            for name in kept
            if by_name[name].log_speedup < by_name[gone].log_speedup
            and by_name[name].closeness < by_name[gone].closeness
        ]
        assert not worse, (gone, worse)


def test_entries_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        entry("a").name = "b"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("goal", "measured", "kept"),
    [
        # 1.4 ± 0.14 may be 1.5, 1.3 ± 0.13 may not. 1.45 is less close than the one that surely reaches it.
        (GOAL, {"may": (1.4, 42.0), "slow": (1.3, 45.0), "poor": (1.45, 38.0), "sure": (1.8, 39.0)}, {"may"}),
        # With one picture nothing is known of the noise of closeness.
        (Goal("psnr", value=39.5), {"may": (1.9, 39.0), "sure": (1.5, 45.0)}, set()),
    ],
)
def test_a_setting_that_may_be_the_best_within_the_noise_goes_on(goal, measured, kept) -> None:
    found = [Estimate(name, 1, speed, speed / 10, psnr, math.inf) for name, (speed, psnr) in measured.items()]
    assert _close_calls(found, goal) == kept


def test_settings_that_were_timed_too_slow_once_are_timed_again() -> None:
    def disturbed(looks: list[Look]) -> list[Look]:
        """Dense was timed 8 % too fast in the round of the best setting."""
        return [dataclasses.replace(look, dense_seconds=look.dense_seconds * 0.92) for look in looks]

    # Nearer to the speed than it seems to be, and less close.
    near = {f"near{i}": (1.48 - 0.01 * i, 52.6 + 0.2 * i) for i in range(5)}
    truth = TRUTH | near | {"s4": (1.55, 54.0)}
    looks = drawn([name for name in truth if name != "s4"], 0, truth)
    looks += disturbed(drawn(["s4"], 0, truth))
    found = run([*ENTRIES, *map(entry, near)], truth, looks=looks)
    assert sum(look.name == "s4" for look in found) == 8
    assert decide(found, GOAL).name == "s4"
