"""Every setting that is out of range raises an error that names it."""

import itertools
import math

import numpy as np
import pytest

from tokenmerge import ConfigError, StepReuse, ToMeConfig
from tokenmerge.config import MergeSettings, dense_outside


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"ratio": 0.76},
            r"ratio: expected 0 ≤ ratio ≤ 1 − 1/\(sx·sy\) = 0.75 for sx=2, sy=2, got 0.76; take a lower",
        ),
        ({"ratio": -0.01}, "got -0.01"),
        (
            {"ratio": math.nan},
            r"ratio: expected a number from 0 to 1 − 1/\(sx·sy\), 0.75 for 2 × 2 cells, got nan",
        ),
        (
            {"ratio": True},
            r"ratio: expected a number from 0 to 1 − 1/\(sx·sy\), 0.75 for 2 × 2 cells, got True",
        ),
        ({"ratio": None}, "got None"),
        ({"ratio": 0.1, "sx": 1, "sy": 1}, "= 0 for sx=1, sy=1"),
        ({"sx": 2.0}, "sx: expected an integer ≥ 1, got 2.0"),
        ({"sy": -1}, "sy: expected an integer ≥ 1, got -1"),
        ({"max_downsample": 0}, "max_downsample: expected one of 1, 2, 4, 8, got 0"),
        ({"seed": 0.5}, "seed: expected an integer, got 0.5"),
        ({"threshold": 1.01}, "threshold: expected a number from -1 to 1, got 1.01"),
        ({"threshold": math.nan}, "got nan"),
        ({"rules": {"level": 2}}, r"rules: expected a list of rules, .* got \{'level': 2\}"),
        ({"rules": [2]}, r"rules\[0\]: rule: expected conditions and settings by name, .* got 2"),
        ({"merge_attn": False}, "merge_attn, merge_crossattn, merge_mlp: all are False"),
        (
            {"planner": "importance", "merge_sharing.guidance": False},
            "merge_sharing.guidance: planner='importance' compares",
        ),
        (
            {"rules": [{"start": 0.5, "planner": "importance"}], "merge_sharing.guidance": False},
            "merge_sharing.guidance: planner='importance' compares",
        ),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        ToMeConfig.from_dict(settings)


HUGE = 10**400


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rules": [{"level": 1, "ratio": "0.2"}]}, r"rules\[0\]: ratio: expected a number .* got '0\.2'"),
        ({"rules": [{"level": 1, 1: 2}]}, r"rules\[0\]: cannot change 1; what can be changed .* is ratio"),
        ({"rules": [{"level": 1.5}]}, r"rules\[0\]: level: expected an integer ≥ 1, got 1\.5"),
        ({"rules": [{"level": 2}, {"start": 0.5, "ratio": None}]}, r"rules\[1\]: ratio: expected a number"),
        ({"rules": [{"level": 2, "reuse.every": 1}]}, r"rules\[0\]: cannot change reuse\.every"),
        ({"rules": [{"start": 0.5, "correction.every": 0}]}, r"rules\[0\]: cannot change correction\.every"),
        ({"rules": [{"start": 0.5, "reuse.every": 2}]}, r"rules\[0\]: reuse\.every: expected 1 .* got 2"),
        ({"rules": [{"start": 0.5, "max_downsample": 2}]}, r"rules\[0\]: cannot change max_downsample"),
        ({"rules": [{"guidance": 5, "ratio": 0.2}]}, r"rules\[0\]: cannot change guidance"),
        (
            {"rules": [{"level": 2, "sx": 4}, {"level": 2, "sx": 1, "sy": 1}]},
            r"rules\[1\]: ratio: expected .* = 0 for sx=1, sy=1, got 0\.5",
        ),
        ({"ratio": HUGE}, "ratio: expected a number from 0"),
        ({"rules": [{"until": HUGE}]}, r"rules\[0\]: until: expected a share of the steps"),
        (
            {"rules": [{"start": 1.0}]},
            r"rules\[0\]: start: expected a share of the steps, from 0 to below 1, got 1",
        ),
        ({"rules": [{"start": 0.8, "until": 0.8}]}, r"rules\[0\]: start: expected less than until=0\.8"),
        ({"seed": HUGE}, "seed: expected an integer that fits into 64 bits, got 1000"),
        ({"seed": 10**5000}, "seed: expected .* got a value of type int that cannot be printed"),
        (
            {"planner": np.array(["tome", "tiled"])},
            "planner: expected one of 'importance', .* got array",
        ),
        ({"merge_sharing.blocks": "no"}, r"merge_sharing\.blocks: expected True or False, got 'no'"),
        ({"max_downsample": 3}, "max_downsample: expected one of 1, 2, 4, 8, got 3"),
        ({"reference_ratio": 0.8}, r"reference_ratio: expected 0 ≤ reference_ratio ≤ .* = 0\.75 .* got 0\.8"),
        ({"reference_ratio": -0.1}, r"reference_ratio: expected a number from 0 .* got -0\.1"),
        ({"reuse": {"often": 2}}, r"expected settings out of ratio, .* got 'reuse\.often'"),
        ({"reuse.every": 2, "reuse": StepReuse()}, r"reuse\.every: given twice"),
        ({"levels": {2: {"ratio": 0.2}}}, "expected settings .* got 'levels'; take rules instead of levels"),
        ({"schedule.ratio": 1}, "got 'schedule.ratio'; take rules instead of"),
        ({"reuse.ends": "free"}, r"got 'reuse\.ends'; take reuse\.full_steps instead of"),
        ({"combine": "norm"}, "combine: expected one of 'mean', 'keep', got 'norm'"),
    ],
)
def test_the_error_names_the_setting(given, message):
    with pytest.raises(ConfigError, match=message):
        ToMeConfig.from_dict(given)


def test_numbers_of_other_types_become_plain():
    config = ToMeConfig(
        ratio=np.float32(0.25), sx=np.int64(4), rules=[{"level": np.int64(2), "sy": np.int8(1)}]
    )
    plain = config.ratio, config.sx, config.rules[0].level, config.rules[0].changes["sy"]
    assert [type(value) for value in plain] == [float, int, int, int]
    assert repr(config) == "ToMeConfig(ratio=0.25, sx=4, rules=({'level': 2, 'sy': 1},))"


def test_a_config_does_not_follow_what_it_was_made_from():
    rule = {"level": 2, "ratio": 0.25}
    config = ToMeConfig(rules=[rule])
    rule["ratio"] = 2.0
    assert config.at_level(2).ratio == 0.25


def test_a_config_shows_what_differs_from_the_defaults():
    assert repr(ToMeConfig()) == "ToMeConfig()"
    config = ToMeConfig(ratio=0.4, reuse=StepReuse(every=2), rules=[{"start": 0.5, "ratio": 0.2}])
    assert repr(config) == (
        "ToMeConfig(ratio=0.4, reuse=StepReuse(every=2), rules=({'start': 0.5, 'ratio': 0.2},))"
    )
    assert eval(repr(config)) == config


def test_what_holds_at_a_step_is_small_and_not_checked_again(monkeypatch):
    rules = [{"start": 0.5, "ratio": 0.25}, {"level": 2, "ratio": 0.1}]
    config = ToMeConfig(rules=rules)
    monkeypatch.setattr(ToMeConfig, "__post_init__", lambda self: pytest.fail("checked again"))
    assert config.at_step(1, 3).at_level(1) == MergeSettings()
    assert config.at_step(2, 3).at_level(1) == MergeSettings(ratio=0.25)
    assert config.at_step(2, 3).at_level(2) == MergeSettings(ratio=0.1)
    assert [phase.at_level(1).ratio for phase in config.phases()] == [0.5, 0.25]
    assert config.at_step(2, 3) is config.at_step(2, 3)


def test_later_rules_win_whatever_their_conditions():
    by_level, by_step = {"level": 2, "ratio": 0.1}, {"start": 0.5, "ratio": 0.2}
    for rules in itertools.permutations((by_level, by_step, {"sx": 4, "ratio": 0.3})):
        config = ToMeConfig(rules=rules)
        assert config.at_step(1, 2).at_level(2).ratio == rules[-1]["ratio"]
        assert config.at_step(0, 2).at_level(1).ratio == 0.3
    config = ToMeConfig(rules=[{"ratio": 0.2}, by_level, {"sx": 4}])
    assert config.at_step(0, 2).at_level(2).ratio == config.at_level(2).ratio == 0.1


def test_a_rule_for_some_steps_makes_them_full():
    config = ToMeConfig(
        reuse=StepReuse(every=3, shallow_every=2), rules=[{"until": 0.2, "ratio": 0, "reuse.every": 1}]
    )
    assert [config.at_step(i, 10).reuse.on for i in range(4)] == [False, False, True, True]
    assert [config.at_step(i, 10).merges for i in range(4)] == [False, False, True, True]


def test_rules_hold_for_reference_pictures_too():
    config = ToMeConfig(
        ratio=0.4,
        reference_ratio=0.5,
        rules=[{"level": 2, "reference_ratio": 0.25}, *dense_outside(0, 0.9)],
    )
    assert config.at_step(8, 9).at_level(1).merges is False
    assert config.at_step(5, 11).at_level(2).reference_ratio == 0.25


@pytest.mark.parametrize("scope", ["keys", "block"])
def test_what_layers_merge_does_not_count_for_other_scopes(scope):
    assert ToMeConfig(scope=scope, merge_attn=False).scope == scope


def test_the_highest_ratio_is_allowed():
    assert ToMeConfig(ratio=0.75).ratio == 0.75
    assert ToMeConfig(ratio=0.9, sx=4, sy=4).ratio == 0.9


def test_a_config_is_a_value():
    assert ToMeConfig.from_dict(ToMeConfig(ratio=0.25, merge_mlp=True).to_dict()) == ToMeConfig(
        ratio=0.25, merge_mlp=True
    )
    assert hash(ToMeConfig()) == hash(ToMeConfig())
