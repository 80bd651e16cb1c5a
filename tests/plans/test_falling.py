"""A ratio that falls over the steps of a generation."""

from __future__ import annotations

import statistics

import pytest

from tokenmerge import Correction, MergeSharing, StepReuse, ToMeConfig
from tokenmerge.models.work import Amount, Share, Work
from tokenmerge.plans import RunFacts, speedup_of
from tokenmerge.plans.falling import FACTORS, falling, width_of_cells

STEPS = 20


def stack(ratio: float) -> ToMeConfig:
    return ToMeConfig(
        ratio=ratio,
        sx=width_of_cells(ratio),
        scope="block",
        planner="tiled",
        merge_sharing=MergeSharing(blocks=True),
        correction=Correction(every=6),
    )


def ratios_of(config: ToMeConfig) -> list[float]:
    return [config.at_step(step, STEPS).ratio for step in range(STEPS)]


@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.5, 0.65, 0.75])
def test_the_ratio_falls_and_keeps_its_mean(ratio):
    ratios = ratios_of(falling(stack(ratio)))
    assert ratios == sorted(ratios, reverse=True)
    assert len(set(ratios)) == len(FACTORS)
    assert statistics.mean(ratios) == pytest.approx(ratio, abs=1e-4)


def test_cells_are_as_wide_as_suits_the_ratio_of_a_phase():
    for ratio in (0.3, 0.5, 0.6):
        config = falling(stack(ratio))
        phases = [config.at_step(step, STEPS) for step in range(STEPS)]
        assert [phase.sx for phase in phases] == [width_of_cells(phase.ratio) for phase in phases]


def test_a_ratio_with_little_room_above_it_falls_less():
    ratios = ratios_of(falling(stack(0.8)))
    assert ratios[0] == pytest.approx(0.875)
    assert statistics.mean(ratios) == pytest.approx(0.8, abs=1e-4)


def test_the_factors_are_those_of_the_quarters():
    assert ratios_of(falling(stack(0.4)))[::5] == [0.46, 0.42, 0.38, 0.34]


@pytest.mark.parametrize("ratio", [0.0, 0.875])
def test_a_ratio_without_room_stays(ratio):
    assert falling(stack(ratio)) == stack(ratio)


def test_further_rules_stay():
    rules = [{"level": 1, "seed": 3}]
    config = falling(ToMeConfig(ratio=0.4, rules=rules))
    assert config.rules[: len(rules)] == ToMeConfig(rules=rules).rules


def test_the_speedup_counts_the_ratio_of_each_full_step_that_merges():
    config = ToMeConfig(
        ratio=0.4,
        scope="block",
        planner="uniform",
        correction=Correction(every=3),
        reuse=StepReuse(full_steps=(0, 0.5, 0.75, 1)),
        rules=[{"start": 0.6, "ratio": 0.2}],
    )
    # Four of the five steps are full: 0, 2, 3 and 4. The first and the last of them correct.
    work = Work((Share("blocks", 1, frozenset({"block"}), Amount(per_token=1)),))
    facts = RunFacts("transformer", work, (1, 10, 10), 5, whole_blocks=True)
    spent = 100 + 60 + 80 + 100
    assert speedup_of(facts, config) == pytest.approx(500 / spent)
