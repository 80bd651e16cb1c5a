"""A tolerance: which of the steps to come are full, by the errors that a generation has shown so far."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import Any

import pytest
from tests.plans.test_choose import MODELS, facts

from tokenmerge.config import ToMeConfig, dense_outside
from tokenmerge.plans import RunFacts, plan_for, policy, speedup_of
from tokenmerge.plans.estimate import Observations
from tokenmerge.plans.tolerance import Tolerance

STEPS, SPEEDUP = 20, 2.5
EVERY = pytest.mark.parametrize("model", MODELS)


def followed(
    of_generation: RunFacts, min_psnr: float, error: Any, change: Any = lambda config: config
) -> ToMeConfig:
    """Return the settings of a generation whose forecasts err so much for each step of their distance."""
    tolerance = Tolerance(of_generation, SPEEDUP, min_psnr, change)
    last, errors = 0, {}
    for done in range(STEPS):
        if tolerance.asks(done):
            own = error(done) if callable(error) else error
            errors |= {done - 1: own * (done - last)} if done > 2 else {}
            tolerance.follow(done, Observations({"deep": errors} if errors else {}))
            last = done
    return tolerance.config


def full_steps(config: ToMeConfig) -> int:
    return len(config.reuse.steps_of(STEPS).full)


@EVERY
def test_without_errors_the_plan_stays(model):
    of_generation = facts(model)
    assert followed(of_generation, 5, 0.0) is plan_for(of_generation, SPEEDUP).config


@EVERY
def test_larger_errors_and_tolerances_run_more_complete_steps(model):
    of_generation = facts(model)
    for given in (
        [(of_plan(of_generation), error) for error in (0.0, 0.1, 1.0, 30.0)],
        [(psnr, 0.1) for psnr in range(10, 60, 5)],
    ):
        configs = [followed(of_generation, *one) for one in given]
        assert full_steps(configs[0]) < full_steps(configs[-1])
        speedups = [speedup_of(of_generation, config) for config in configs]
        # Choices follow one another: a careful one early can allow for a bolder one later.
        assert all(later < 1.1 * before for before, later in pairwise(speedups))
        assert speedups[0] <= plan_for(of_generation, SPEEDUP).speedup + 1e-9


def of_plan(of_generation: RunFacts) -> float:
    """Return a tolerance that the plan of the speed-up just keeps, as far as it is known at the beginning."""
    return -10 * math.log10(plan_for(of_generation, SPEEDUP).expected_error) - policy.ESTIMATE["margin"] - 0.5


@EVERY
def test_an_error_that_is_no_number_makes_the_rest_dense(model):
    config = followed(facts(model), 10, math.nan)
    runs = config.reuse.steps_of(STEPS).full
    first = runs[2] + 1
    assert set(range(first, STEPS)) <= set(runs)
    assert not any(config.at_step(step, STEPS).merges for step in range(first, STEPS))


def test_nothing_that_is_expected_to_be_too_far_begins_merged():
    assert followed(facts("transformer"), 500, 0.0) == plan_for(facts("transformer"), 1).config


def test_the_settings_stay_changed():
    rules = dense_outside(0.5, 1.0)

    def change(config: ToMeConfig) -> ToMeConfig:
        return dataclasses.replace(config, rules=(*config.rules, *rules))

    config = followed(facts("transformer"), 20, 0.5, change)
    assert [rule for rule in config.rules if rule in rules] == list(rules)
    assert not config.at_step(0, STEPS).merges
