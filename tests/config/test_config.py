"""Every setting that is out of range raises an error that names it."""

import math

import numpy as np
import pytest

from tokenmerge import ConfigError, Schedule, StepReuse, ToMeConfig
from tokenmerge.config import MergeSettings


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
        ({"schedule.ratio": 0.5}, r"schedule.ratio: expected factors ≥ 0, .*, got 0\.5"),
        ({"schedule.ratio": ()}, r"schedule.ratio: expected factors ≥ 0, .*, got \(\)"),
        ({"schedule.ratio": (1.0, -0.02)}, r"schedule.ratio: expected factors ≥ 0, .*, got \(1.0, -0.02\)"),
        ({"schedule.ratio": (math.nan,)}, r"schedule.ratio: expected factors ≥ 0, .* got \(nan,\)"),
        ({"levels": None}, r"levels: expected \{level: \{setting: value\}\}, got None"),
        ({"levels": [2]}, r"levels: expected .*, got \[2\]"),
        ({"schedule.phases": {0.5: None}}, r"schedule.phases: expected .*, got \{0\.5: None\}"),
        ({"use_rand": 1}, "use_rand: expected True or False, got 1"),
        ({"merge_attn": False}, "merge_attn, merge_crossattn, merge_mlp: all are False"),
        ({"planner": "importance", "plans.guidance": False}, "plans.guidance: planner='importance' compares"),
        (
            {"schedule.phases": {0.5: {"planner": "importance"}}, "plans.guidance": False},
            "plans.guidance: planner='importance' compares",
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
        ({"levels": {1: {"ratio": "0.2"}}}, r"levels\[1\]\.ratio: expected a number .* got '0\.2'"),
        ({"levels": {1: {1: 2}}}, "levels: cannot change 1; what can be changed is ratio"),
        ({"levels": {1.5: {}}}, r"levels: expected an integer ≥ 1, got 1\.5"),
        (
            {"phases": {0.5: {"ratio": None}}},
            r"schedule\.phases\[0\.5\]\.ratio: expected a number .* got None",
        ),
        ({"schedule": lambda done: 1.0}, r"schedule\.ratio: a function .* was removed .*take numbers"),
        ({"schedule": "a"}, r"schedule\.ratio: expected factors ≥ 0, .* got 'a'"),
        ({"ratio": HUGE}, "ratio: expected a number from 0"),
        ({"until": HUGE}, r"schedule\.until: expected a share of the steps"),
        (
            {"schedule.start": 1.0},
            r"schedule\.start: expected a share of the steps, from 0 to below 1, got 1",
        ),
        ({"schedule.start": 0.8, "until": 0.8}, r"schedule\.start: expected less than schedule\.until=0\.8"),
        ({"seed": HUGE}, "seed: expected an integer that fits into 64 bits, got 1000"),
        ({"seed": 10**5000}, "seed: expected .* got a value of type int that cannot be printed"),
        (
            {"planner": np.array(["tome", "tiled"])},
            "planner: expected one of 'importance', .* got array",
        ),
        ({"share_plan": "no"}, r"plans\.blocks: expected True or False, got 'no'"),
        ({"max_downsample": 3}, "max_downsample: expected one of 1, 2, 4, 8, got 3"),
        ({"ratio": 0.7, "schedule": (1.4, 0.6)}, r"ratio: .* got 0\.98 \(0\.7 × 1\.4 of schedule\.ratio\)"),
        ({"reference_ratio": 0.8}, r"reference_ratio: expected 0 ≤ reference_ratio ≤ .* = 0\.75 .* got 0\.8"),
        ({"reference_ratio": -0.1}, r"reference_ratio: expected a number from 0 .* got -0\.1"),
        (
            {"ratio": 0.3, "reference_ratio": 0.7, "schedule": (1.4, 0.6)},
            r"reference_ratio: .* got 0\.98 \(0\.7 × 1\.4 of schedule\.ratio\)",
        ),
        (
            {"levels": {2: {"sx": 1, "sy": 1}}},
            r"levels\[2\]: ratio: expected .* = 0 for sx=1, sy=1, got 0\.5",
        ),
        ({"reuse": {"often": 2}}, r"expected settings out of ratio, .* got reuse\.often"),
    ],
)
def test_the_error_names_the_setting(given, message):
    with pytest.raises(ConfigError, match=message):
        ToMeConfig.from_dict(given)


def test_numbers_of_other_types_become_plain():
    config = ToMeConfig(ratio=np.float32(0.25), sx=np.int64(4), levels={np.int64(2): {"sy": np.int8(1)}})
    assert [type(value) for value in (config.ratio, config.sx, config.levels[2]["sy"])] == [float, int, int]
    assert repr(config) == "ToMeConfig(ratio=0.25, sx=4, levels={2: {'sy': 1}})"


def test_a_config_does_not_follow_what_it_was_made_from():
    levels = {2: {"ratio": 0.25}}
    config = ToMeConfig(levels=levels)
    levels[2]["ratio"] = 2.0
    assert config.at(2, 0, 1).ratio == 0.25


def test_a_config_shows_what_differs_from_the_defaults():
    assert repr(ToMeConfig()) == "ToMeConfig()"
    config = ToMeConfig(ratio=0.4, reuse=StepReuse(every=2), schedule=Schedule(ratio=[1, 0.5]))
    assert repr(config) == (
        "ToMeConfig(ratio=0.4, schedule=Schedule(ratio=(1.0, 0.5)), reuse=StepReuse(every=2))"
    )


def test_what_holds_at_a_step_is_small_and_not_checked_again(monkeypatch):
    config = ToMeConfig(schedule=Schedule(ratio=(1.0, 0.0)), levels={2: {"ratio": 0.2}})
    monkeypatch.setattr(ToMeConfig, "__post_init__", lambda self: pytest.fail("checked again"))
    assert config.at(2, 1, 3) == MergeSettings(ratio=0.1)
    assert list(config.stages(1)) == [MergeSettings(ratio=0.5)]


def test_a_schedule_multiplies_the_ratio_of_reference_pictures_too():
    config = ToMeConfig(
        ratio=0.4,
        reference_ratio=0.5,
        schedule=Schedule(ratio=(1.2, 0.6), until=0.9),
        levels={2: {"reference_ratio": 0.25}},
    )
    assert config.at(1, 8, 9).merges is False
    middle = config.at(1, 5, 11)
    assert (middle.ratio, middle.reference_ratio) == pytest.approx((0.36, 0.45))
    assert (config.most().reference_ratio, config.most().levels[2]["reference_ratio"]) == pytest.approx(
        (0.6, 0.3)
    )
    assert next(config.stages(2)).of_references.ratio == pytest.approx(0.3)


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
