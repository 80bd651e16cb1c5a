"""Plans of one speed: their settings, and the neighbours of a plan."""

from __future__ import annotations

from itertools import islice
from random import Random

import pytest
from tests.models.tiny import FAMILIES

from tokenmerge.models.find import find_hosts
from tokenmerge.plans import RunFacts, facts_of, plan_for, speedup_of
from tokenmerge.plans.generation import plan_generation
from tokenmerge_tools.tune.plans import COMPLETE, Budget, SearchedPlan, neighbours, rule_plan

MODELS = {"unet": "UNet2DConditionModel", "transformer": "FluxTransformer2DModel"}
EVERY = pytest.mark.parametrize("model", MODELS)
AT = pytest.mark.parametrize(
    ("steps", "speedup"), [(50, 2.5), (20, 1.3), (20, 2.0), (8, 1.5), (4, 1.2), (2, 1.5)]
)


def facts(model: str, steps: int, side: int = 64, guidance: float = 7.5) -> RunFacts:
    host = find_hosts(FAMILIES[MODELS[model]].build())[0]
    return facts_of(host, (1, side, side), steps, guidance=guidance)


def plans(model: str, steps: int, speedup: float) -> tuple[RunFacts, list[SearchedPlan]]:
    """The plans that a search begins with, and neighbours of each."""
    known, found = facts(model, steps), list[SearchedPlan]()
    random, budget = Random(0), Budget(known, speedup)
    rule = rule_plan(known, speedup)
    for plan in (rule, *islice(neighbours(rule, budget, random), 5)):
        found += [plan, *islice(neighbours(plan, budget, random), 20)]
    return known, found


@EVERY
@AT
def test_the_first_plan_does_what_the_rule_does(model: str, steps: int, speedup: float) -> None:
    rule = plan_for(facts(model, steps), speedup).config
    first = rule_plan(facts(model, steps), speedup)
    assert plan_generation(first.config, steps) == plan_generation(rule, steps)


@EVERY
@AT
def test_a_plan_and_its_settings_are_the_same(model: str, steps: int, speedup: float) -> None:
    _, found = plans(model, steps, speedup)
    assert len(found) > 1
    for plan in found:
        assert SearchedPlan.of(plan.config, steps) == plan
    assert len({plan.name for plan in found}) == len(set(found))


@EVERY
@AT
def test_no_plan_is_slower_than_the_rule(model: str, steps: int, speedup: float) -> None:
    known, found = plans(model, steps, speedup)
    reached = plan_for(known, speedup).speedup
    assert speedup_of(known, rule_plan(known, speedup).config) >= reached - 1e-9
    for plan in found:
        assert speedup_of(known, plan.config) >= min(speedup, reached) - 1e-9
        assert plan.runs[0] == COMPLETE
        assert len(plan.runs) == steps


@EVERY
def test_neighbours_change_places_and_the_ratio(model: str) -> None:
    known = facts(model, 20, guidance=3.0)  # at which the rule skips steps of both models
    rule = rule_plan(known, 2.0)
    found = list(islice(neighbours(rule, Budget(known, 2.0), Random(0)), 60))
    assert rule not in found
    swaps = [one for one in found if one.merging == rule.merging and sorted(one.runs) == sorted(rule.runs)]
    assert swaps
    assert len({one.merging.ratio for one in found}) > 1 or not rule.merging.ratio
    assert len({one.runs.count(COMPLETE) for one in found}) > 1
    assert len(set(found)) > 30
