"""Every setting that is out of range says so."""

import math

import pytest

from tokenmerge import ConfigError, ToMeConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"ratio": 0.76},
            r"ratio: expected 0 ≤ ratio ≤ 1 − 1/\(sx·sy\) = 0.75 for sx=2, sy=2, got 0.76; take a lower",
        ),
        ({"ratio": -0.01}, "got -0.01"),
        ({"ratio": math.nan}, r"ratio: expected a number from 0 to 1 − 1/\(sx·sy\), got nan"),
        ({"ratio": True}, r"ratio: expected a number from 0 to 1 − 1/\(sx·sy\), got True"),
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
        (
            {"schedule.ratio": lambda done: 1 - 2 * done},
            r"schedule.ratio at 0.51: .* a factor ≥ 0, got -0.02",
        ),
        ({"schedule.ratio": lambda done: math.nan}, "schedule.ratio at 0: .* a factor ≥ 0, got nan"),
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


@pytest.mark.parametrize("scope", ["keys", "block", "stack"])
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
