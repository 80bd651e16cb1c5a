"""The default method: laws of the plan that it makes from facts and a wanted speed-up."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from tests.models.tiny import FAMILIES

from tokenmerge import Correction, MergeSharing, StepReuse, ToMeConfig
from tokenmerge.default_method import DefaultMethod
from tokenmerge.models.find import find_hosts
from tokenmerge.plans import (
    ROUNDING,
    FewestTokens,
    RunFacts,
    Schedule,
    facts_of,
    fewest_at,
    pays_from,
    plan_for,
    policy,
    speedup_of,
)
from tokenmerge.plans.choose import (
    _mergings,
    distance,
    merging_pays,
    plans_of,
    reaches_of,
    scopes_of,
    skipping_error_of,
)
from tokenmerge.plans.policy import MADE_GOOD, expected_errors_of
from tokenmerge.report import predict

TOO_MANY = pays_from(64 * 64 + 1)  # tokens from which merging pays: more than there are
SPEEDUPS = (1.1, 1.3, 1.5, 1.8, 2.0, 2.5, 3.0)
MODELS = {"unet": "UNet2DConditionModel", "transformer": "FluxTransformer2DModel"}


def facts(model: str, side: int = 64, **changes: object) -> RunFacts:
    host = find_hosts(FAMILIES[MODELS[model]].build())[0]
    return facts_of(host, (1, side, side), **{"steps": 20, "guidance": 3.0, **changes})


def choose(of_generation: RunFacts, wanted: float) -> ToMeConfig:
    return plan_for(of_generation, wanted).config


EVERY = pytest.mark.parametrize(
    ("model", "steps", "guidance"), [*itertools.product(MODELS, (50, 20, 8, 4), (None, 1.0, 7.5))]
)


@EVERY
def test_the_settings_reach_the_speed_up_or_are_the_fastest(model, steps, guidance):
    of_generation = facts(model, steps=steps, guidance=guidance)
    highest = plan_for(of_generation, math.inf).speedup
    for wanted in SPEEDUPS:
        reached = speedup_of(of_generation, choose(of_generation, wanted))
        assert reached >= wanted - ROUNDING or reached == pytest.approx(highest)


@pytest.mark.parametrize(
    ("steps", "wanted", "full_steps"), [(20, 2.0, 10), (28, 2.0, 14), (50, 2.0, 25), (20, 2.5, 8)]
)
def test_a_share_of_the_steps_reaches_the_speed_up_that_it_is_called_by(steps, wanted, full_steps):
    """The first and the last layer run in every step, so half of the steps give a little less than 2×."""
    of_generation = facts("transformer", steps=steps, fewest_tokens=TOO_MANY)
    plan = plan_for(of_generation, wanted)
    assert len(plan.config.reuse.steps_of(steps).full) == full_steps
    assert wanted - ROUNDING <= plan.speedup < wanted


@EVERY
def test_a_higher_speed_up_is_never_closer(model, steps, guidance):
    plans = [plan_for(facts(model, steps=steps, guidance=guidance), wanted) for wanted in SPEEDUPS]
    expected_errors = [plan.expected_error for plan in plans]
    assert expected_errors == sorted(expected_errors)


@EVERY
def test_a_plan_says_what_its_settings_give(model, steps, guidance):
    of_generation = facts(model, steps=steps, guidance=guidance)
    for wanted in SPEEDUPS:
        plan = plan_for(of_generation, wanted)
        assert speedup_of(of_generation, plan.config) == pytest.approx(plan.speedup)


def test_a_last_step_that_changes_little_costs_nothing():
    assert reaches_of((0, 1, 2), 4) == [25.0]
    assert reaches_of((0, 1, 2), 4, ends_clean=True) == []


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("wanted", [1.2, 1.6])
def test_the_speed_up_is_counted(model, wanted):
    """The settings applied to the model itself save what the plan says."""
    network = FAMILIES[MODELS[model]].build()
    host = find_hosts(network)[0]
    plan = plan_for(facts_of(host, (1, 48, 48), 8, guidance=1.0), wanted)
    side = 48 * host.patch
    report = predict(network, plan.config, side, side, batch=1, steps=8)
    assert report.speedup == pytest.approx(plan.speedup, rel=0.01)


@pytest.mark.parametrize("model", MODELS)
def test_at_speed_up_1_everything_is_dense(model):
    config = choose(facts(model), 1.0)
    assert not config.merges
    assert not config.follows_steps


def test_settings_stay_the_same_for_all_steps_where_these_are_unknown():
    config = choose(facts("unet", follows_steps=False), 1.3)
    assert config.merges
    assert not config.follows_steps


def test_nothing_is_skipped_that_must_run():
    config = choose(facts("transformer", can_skip=False), 1.5)
    assert config.merges
    assert not config.reuse.on


def test_grids_stay_dense_that_are_too_small_to_gain():
    config = choose(facts("transformer", fewest_tokens=TOO_MANY), 1.5)
    assert not config.merges
    assert config.reuse.on


@pytest.mark.parametrize("model", MODELS)
def test_whole_blocks_merge_only_where_all_can(model):
    for wanted in SPEEDUPS:
        assert choose(facts(model, whole_blocks=False), wanted).scope == "layers"
        assert (
            choose(facts(model, layers=False), wanted).scope == "block"
            or not choose(facts(model, layers=False), wanted).merges
        )


@pytest.mark.usefixtures("large_grids_alone")
def test_small_grids_stay_dense():
    """On few tokens, skipping more steps of a UNet loses less. A transformer merges where time is saved."""
    assert 32 * 32 < policy.fewest_tokens("unet") <= 48 * 48
    assert not choose(facts("unet", side=32), 2.0).merges
    timed = {"fewest_tokens": pays_from(32 * 32), "guidance": 7.0}
    assert choose(facts("transformer", side=32, **timed), 2.0).merges
    assert not choose(facts("transformer", side=31, **timed), 2.0).merges


@pytest.mark.parametrize(
    ("ratio", "tokens"), [(0.1, 900), (0.2, 900), (0.475, 900), (0.5, 400), (0.75, 400), (1.0, 400)]
)
def test_the_highest_timed_ratio_counts_that_is_not_above(ratio, tokens):
    timed = (FewestTokens("block", 0.5, 400), FewestTokens("block", 0.2, 900), FewestTokens("layers", 0.2, 7))
    assert facts("transformer", fewest_tokens=timed).min_tokens("block", ratio) == tokens
    assert fewest_at(timed, "block", ratio) == tokens
    assert fewest_at(timed, "keys", ratio) == 0


@pytest.mark.usefixtures("large_grids_alone")
def test_no_fewer_tokens_merge_than_the_policy_says():
    timed = (FewestTokens("layers", 0.2, 4000), FewestTokens("layers", 0.5, 16))
    of_generation = facts("unet", fewest_tokens=timed)
    assert of_generation.min_tokens("layers", 0.2) == 4000
    assert of_generation.min_tokens("layers", 0.5) == policy.fewest_tokens("unet") > 16


def test_a_ratio_that_saves_too_little_time_refuses_no_higher_one():
    timed = (FewestTokens("block", 0.2, 64 * 64 + 1), FewestTokens("block", 0.5, 48 * 48))
    of_generation = facts("transformer", fewest_tokens=timed, guidance=7.0)
    merging = [plan.config for plan in plans_of(of_generation) if plan.config.merges]
    assert merging
    assert all(config.ratio >= 0.5 and config.min_tokens == 48 * 48 for config in merging)
    assert merging_pays(of_generation)
    both = dataclasses.replace(of_generation, fewest_tokens=pays_from(48 * 48))
    assert any(plan.config.merges and plan.config.ratio < 0.5 for plan in plans_of(both))


def test_settings_for_patching_merge_on_every_grid_that_some_generation_merges():
    """Also where the plan for the default size merges less, which pays on larger grids alone."""
    timed = (FewestTokens("block", 0.2, 64 * 64), FewestTokens("block", 0.5, 32 * 32))
    method = DefaultMethod(1.2, facts("transformer", fewest_tokens=timed, can_skip=False))
    assert method.settings(method.facts).min_tokens == 64 * 64
    assert method.widest.min_tokens == 32 * 32
    smaller = method.settings(method.facts_at((1, 32, 32), guidance=3.0))
    assert smaller.merges
    assert smaller.min_tokens == method.widest.min_tokens


@pytest.mark.parametrize("scope", ["block", "layers"])
def test_a_scope_that_saves_too_little_time_refuses_no_other(scope):
    fewest = {"block": 64 * 64 + 1, "layers": 64 * 64 + 1, scope: 64}
    timed = tuple(FewestTokens(own, 0.2, tokens) for own, tokens in fewest.items())
    of_generation = facts("transformer", fewest_tokens=timed, follows_steps=False)
    assert {plan.config.scope for plan in plans_of(of_generation) if plan.config.merges} == {scope}
    assert merging_pays(of_generation)
    assert not merging_pays(dataclasses.replace(of_generation, fewest_tokens=TOO_MANY))


def test_transformers_merge_once_for_all_blocks():
    """A stack is exact, and merges and caches once: merging around attention alone is not tried."""
    scopes = {choose(facts("transformer", guidance=7.0), wanted).scope for wanted in (1.3, 2.0, 3.0, 4.0)}
    assert scopes == {"block"}
    assert scopes_of(facts("transformer", guidance=7.0)) == ["block"]
    assert scopes_of(facts("transformer", guidance=7.0, follows_steps=False)) == ["layers", "block"]


def test_whole_blocks_merge_fewer_tokens_than_attention_alone_would():
    """Where they merge once, a tenth of them is tried; around attention, a fifth."""
    unknown_steps = facts("transformer", guidance=7.0, follows_steps=False)
    tried = [(one.scope, one.ratio) for one in _mergings(unknown_steps) if one.merges]
    for scope, least in (("block", 0.1), ("layers", 0.2)):
        assert min(ratio for own, ratio in tried if own == scope) == least
    assert choose(unknown_steps, 1.1).ratio == 0.1


def test_without_proportional_attention_merging_loses_more():
    usual, other = (plan_for(facts("unet", proportional=own), 2.0) for own in (True, False))
    assert other.expected_error > usual.expected_error


def test_the_ratio_of_a_stack_falls_and_that_of_attention_alone_stays():
    for wanted in (1.5, 2.4, 3.0):
        config = choose(facts("transformer", guidance=7.0), wanted)
        ratios = [config.at_step(step, 20).ratio for step in range(20)]
        assert ratios[0] > config.ratio > ratios[-1] > 0
    for other in (facts("unet"), facts("transformer", follows_steps=False)):
        assert not any(plan.config.rules for plan in plans_of(other))


def test_planners_of_transformers_compare_what_the_model_added():
    for model, compared in (("unet", "input"), ("transformer", "model_residual")):
        assert choose(facts(model), 2.0).features == compared
    assert choose(facts("transformer", follows_steps=False), 2.0).features == "input"


def test_few_steps_of_transformers_are_corrected_under_strong_guidance():
    """Without a correction, the first step decides: in the record this loses 8 dB."""
    for steps in (4, 8):
        of_generation = facts("transformer", steps=steps, guidance=7.0)
        assert choose(of_generation, 1.3).correction.on


def test_a_correction_is_not_expected_to_wear_off_after_the_end():
    """With fewer full steps than its distance, it only has to last for these."""
    of_generation = facts("transformer", steps=5, can_skip=False)
    expected_errors = expected_errors_of("transformer", 1.0)
    plans = [plan_for(of_generation, wanted) for wanted in SPEEDUPS]
    rarely = [plan for plan in plans if plan.config.correction.every == 6]
    assert rarely
    for plan in rarely:
        assert plan.expected_error == expected_errors.of_merging(plan.config.scope, plan.config.ratio, 5)


def test_nothing_corrects_a_unet_under_strong_guidance():
    """In the record this loses up to 9 dB."""
    for wanted in SPEEDUPS:
        assert not choose(facts("unet", guidance=7.5), wanted).correction.on


def test_corrections_take_the_memory_of_one_residual_for_a_stack():
    model = FAMILIES[MODELS["transformer"]].build()
    host = find_hosts(model)[0]
    side = 48 * host.patch
    stack = ToMeConfig(
        ratio=0.5,
        scope="block",
        planner="tiled",
        merge_sharing=MergeSharing(blocks=True),
        correction=Correction(every=2),
    )
    alone = dataclasses.replace(stack, merge_sharing=MergeSharing())
    kept = predict(model, stack, side, side, batch=1, steps=4).kept_bytes
    residual = 32 * 48 * 48 * 4  # channels, tokens, bytes of float32
    assert residual < kept < 2 * residual  # and the plan, whose share is large in such a narrow model
    assert predict(model, alone, side, side, batch=1, steps=4).kept_bytes > 4 * residual


def test_tokens_count_as_often_as_they_stand_for_where_attention_can():
    assert choose(facts("unet"), 2.0).proportional
    assert not choose(facts("unet", proportional=False), 2.0).proportional


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_short_generations_run_every_step(steps):
    assert not choose(facts("unet", steps=steps), 1.5).reuse.on


def test_unknown_guidance_counts_as_strong():
    assert choose(facts("unet", guidance=None), 1.5) == choose(facts("unet", guidance=7.5), 1.5)


@pytest.mark.parametrize("guidance", [1.0, 7.5])
def test_an_unknown_class_gets_the_highest_harms(guidance):
    careful = expected_errors_of("other", guidance)
    for model in MODELS:
        known = expected_errors_of(model, guidance)
        assert careful.corrected is None or careful.corrected.size >= known.corrected.size
        for own, less in ((careful.skip, known.skip), (careful.merge, known.merge)):
            assert all(own[name].size >= expected_error.size for name, expected_error in less.items())


def test_a_unet_of_unknown_parts_is_planned_too():
    of_generation = dataclasses.replace(facts("unet"), model="other")
    assert speedup_of(of_generation, choose(of_generation, 1.5)) >= 1.5


@pytest.mark.parametrize(("steps", "stride"), [(4, 1), (5, 1), (8, 1), (20, 1), (50, 1), (1000, 83)])
def test_every_number_of_complete_steps_has_its_distance(steps, stride):
    for full_steps in range(3, steps + 1, stride):
        every = distance(steps, full_steps)
        config = ToMeConfig.from_dict({"reuse.every": every})
        assert len(config.reuse.steps_of(steps).full) == full_steps


def complete_steps(of_generation: RunFacts, wanted: float) -> tuple[int, ...]:
    return choose(of_generation, wanted).reuse.steps_of(of_generation.steps).full


def test_complete_steps_of_a_unet_are_closer_together_towards_the_end_under_strong_guidance():
    full = complete_steps(facts("unet", guidance=7.5, fewest_tokens=TOO_MANY), 1.5)
    even = StepReuse(every=distance(20, len(full))).steps_of(20).full
    assert len(full) == len(even) < 20
    assert (full[0], full[1], full[-1]) == (0, 1, 19)
    assert sum(full) > sum(even)


@pytest.mark.parametrize(("model", "guidance"), [("unet", 3.0), ("transformer", 3.0), ("transformer", 7.5)])
def test_other_complete_steps_are_evenly_spaced(model, guidance):
    reuse = choose(facts(model, guidance=guidance, fewest_tokens=TOO_MANY), 1.5).reuse
    assert reuse.on
    assert not reuse.full_steps


@pytest.mark.parametrize("wanted", [1.3, 1.66, 2.0])
def test_a_solver_that_adds_noise_gets_the_plan_of_strong_guidance(wanted):
    weak, strong = (facts("unet", guidance=guidance) for guidance in (3.0, 7.5))
    noisy = dataclasses.replace(weak, schedule=Schedule(adds_noise=True))
    assert choose(noisy, wanted) == choose(strong, wanted) != choose(weak, wanted)


def test_what_forecasts_miss_is_made_good_by_euler_without_guidance_alone():
    runs = StepReuse(every=2).steps_of(20)
    errors = {
        (euler, guidance): skipping_error_of(
            facts("transformer", guidance=guidance, schedule=Schedule(is_euler=euler)), runs
        )
        for euler in (False, True)
        for guidance in (1.0, 3.0, None)
    }
    times = {guidance: errors[True, guidance] / errors[False, guidance] for guidance in (1.0, 3.0, None)}
    assert times == {1.0: pytest.approx(MADE_GOOD), 3.0: 1.0, None: 1.0}


@pytest.mark.parametrize("steps", [4, 8, 20, 50])
def test_a_last_step_without_noise_is_not_complete(steps):
    """As many others are, so that the speed-up stays the same."""
    usual, clean = (
        facts("transformer", steps=steps, fewest_tokens=TOO_MANY, schedule=Schedule(ends_clean=own))
        for own in (False, True)
    )
    assert complete_steps(usual, 1.8)[-1] == steps - 1
    assert complete_steps(clean, 1.8)[-1] < steps - 1
    assert plan_for(clean, 1.3).speedup == plan_for(usual, 1.3).speedup


def test_a_speedup_of_1_is_dense_also_where_the_last_step_could_be_skipped_for_nothing():
    clean = facts("transformer", fewest_tokens=TOO_MANY, schedule=Schedule(ends_clean=True))
    plan = plan_for(clean, 1.0)
    assert (plan.speedup, plan.expected_error) == (1.0, 0.0)
    assert not plan.config.merges
    assert len(plan.config.reuse.steps_of(clean.steps).full) == clean.steps
    assert plan_for(clean, 1.01).speedup > 1.01
