"""Any value of any setting makes a config that works, or an error that names the setting."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmerge import (
    ConfigError,
    Correction,
    DecreasingSchedule,
    MergeSharing,
    StepReuse,
    TokenMergingError,
    ToMeConfig,
    ViTConfig,
)
from tokenmerge.config import (
    PLANNERS,
    SCOPES,
    SETTINGS,
    MergeSettings,
    load_config,
    save_config,
)
from tokenmerge.config.settings import COMBINATIONS, FEATURES

MANY = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no")


ODD = st.sampled_from(
    [
        *(None, True, False, "", "a", "tome", b"a", [], {}, (), set(), object(), Unprintable(), ToMeConfig),
        *(10**400, -(10**400), 10**5000, 2**63, math.inf, -math.inf, math.nan, 1j, Decimal("0.5")),
        *(Fraction(1, 3), np.int64(2), np.float32(0.25), np.bool_(True), np.array(2), np.array([0.5, 1.0])),
        *(np.array([[1.0]]), torch.tensor(0.5), torch.ones(2), "0.2", {1: 2}, {"every": 2}, [0.5, "a"]),
        *(abs, lambda done: 1.0),
    ]
)
ANYTHING = ODD | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.floats(0, 2), max_size=3)

VALID = {
    "ratio": st.floats(0, 0.75),
    "reference_ratio": st.none() | st.floats(0, 0.75),
    "max_downsample": st.sampled_from([1, 2, 4, 8]),
    "min_tokens": st.integers(0, 5000),
    "sx": st.integers(1, 8),
    "sy": st.integers(1, 8),
    "st": st.integers(1, 4),
    "seed": st.none() | st.integers(-10, 10),
    "merge_attn": st.booleans(),
    "merge_crossattn": st.booleans(),
    "merge_mlp": st.booleans(),
    "scope": st.sampled_from(SCOPES),
    "planner": st.sampled_from(PLANNERS),
    "features": st.sampled_from(FEATURES),
    "combine": st.sampled_from(COMBINATIONS),
    "threshold": st.floats(-1, 1),
    "proportional": st.booleans(),
    "merge_sharing.every": st.integers(1, 9),
    "merge_sharing.blocks": st.booleans(),
    "merge_sharing.guidance": st.booleans(),
    "correction.every": st.sampled_from([0, 2, 3]),
    "reuse.every": st.integers(1, 5) | st.floats(1, 5),
    "reuse.shallow_every": st.integers(1, 5) | st.floats(1, 5),
    "reuse.full_steps": st.lists(st.floats(0, 1), max_size=5, unique=True).map(sorted),
    "reuse.shallow_steps": st.lists(st.floats(0, 1), max_size=5, unique=True).map(sorted),
}


CONDITIONS = {
    "level": st.sampled_from([1, 2, 4]) | ANYTHING,
    "start": st.floats(0, 0.99) | ANYTHING,
    "until": st.floats(0.01, 1) | ANYTHING,
}
RULE = st.tuples(
    st.sampled_from(sorted(CONDITIONS)).flatmap(
        lambda name: st.dictionaries(st.just(name), CONDITIONS[name], max_size=1)
    ),
    st.sampled_from(sorted(VALID)).flatmap(
        lambda name: st.dictionaries(st.just(name), VALID[name] | ANYTHING, max_size=1)
    ),
    st.dictionaries(st.sampled_from(["ratio", "seed", "until", 1, None]), ODD, max_size=1),
).map(lambda parts: {**parts[0], **parts[1], **parts[2]})

VALUES = {
    **{name: valid | ANYTHING for name, valid in VALID.items()},
    "rules": st.lists(RULE | ANYTHING, max_size=3) | ANYTHING,
}


def chosen(values):
    """Some settings by name."""
    return st.sets(st.sampled_from(sorted(values)), min_size=1, max_size=4).flatmap(
        lambda names: st.fixed_dictionaries({name: values[name] for name in sorted(names)})
    )


def test_every_setting_is_tried():
    assert VALUES.keys() == set(SETTINGS)


def check_result(config: ToMeConfig, folder) -> None:
    """Check that the methods and properties of a config work."""
    assert isinstance(hash(config), int)
    assert repr(config).startswith("ToMeConfig(")
    assert all(isinstance(text, str) for text in config.over_steps)
    assert not any(rule.of_steps for phase in config.phases() for rule in phase.rules)
    for index in range(3):
        step = config.at_step(index, 3)
        assert step in config.phases()
        assert type(step.at_level(2)) is MergeSettings
    for steps in (1, 2, 3, 10):
        runs = config.reuse.steps_of(steps)
        assert set(runs.full) <= set(runs.finest) <= set(range(steps))
        assert list(runs.full) == sorted(set(runs.full))
        ends = {0, min(1, steps - 1), steps - 1}
        assert config.reuse.full_steps or ends <= set(runs.full)
    save_config(config, folder / "settings.json")
    assert load_config(folder / "settings.json") == config


def attempt(make):
    """The result of ``make`` and "", or None and the message of its error; any other error is a failure."""
    try:
        return make(), ""
    except TokenMergingError as error:
        return None, str(error)


@MANY
@given(given_settings=chosen(VALUES))
def test_a_config_works_or_the_error_names_the_setting(given_settings, tmp_path_factory):
    config, message = attempt(lambda: ToMeConfig.from_dict(given_settings))
    if config is None:
        assert any(name in message for name in given_settings)
    else:
        check_result(config, tmp_path_factory.getbasetemp())
        assert ToMeConfig.from_dict(vars(config)) == config


@MANY
@given(given_settings=chosen(VALID))
def test_valid_settings_are_refused_only_where_they_do_not_go_together(given_settings, tmp_path_factory):
    config, _ = attempt(lambda: ToMeConfig.from_dict(given_settings))
    if config is None:
        together = {"ratio", "sx", "sy", "st", "planner", "merge_attn", "reuse.shallow_every"}
        together |= {"reuse.shallow_steps", "features"}
        assert given_settings.keys() & {*together, "merge_sharing.guidance", "correction.every"}
    else:
        check_result(config, tmp_path_factory.getbasetemp())


@given(name=st.sampled_from(["merge_sharing", "correction", "reuse"]), value=ANYTHING)
def test_a_part_is_of_its_class(name, value):
    with pytest.raises(ConfigError, match=f"{name}: expected a "):
        ToMeConfig(**{name: value})


@MANY
@given(data=st.data(), part=st.sampled_from([MergeSharing, Correction, StepReuse]), value=ANYTHING)
def test_a_part_works_or_the_error_names_its_field(data, part, value):
    field = data.draw(st.sampled_from(sorted(vars(part()))))
    made, message = attempt(lambda: part(**{field: value}))
    if made is None:
        assert f".{field}" in message
    else:
        assert isinstance(hash(made), int)
        assert repr(made).startswith(part.__name__)


@MANY
@given(
    name=st.sampled_from(["r", "proportional_attention", "unmerge"]),
    value=ANYTHING | st.lists(ANYTHING, max_size=4),
    depth=st.integers(1, 4),
)
def test_settings_of_vision_transformers_work_or_the_error_names_the_field(name, value, depth):
    config, message = attempt(lambda: ViTConfig(**{name: value}))
    if config is None:
        assert message.startswith(name)
        return
    counts, message = attempt(lambda: config.per_layer(depth))
    if counts is None:
        assert message.startswith("r: expected")
    else:
        assert len(counts) == depth
        assert all(type(count) is int for count in counts)
    assert isinstance(config.to_dict(), dict)
    assert isinstance(hash(config), int)


@MANY
@given(r=ANYTHING, depth=st.integers(1, 4))
def test_a_decreasing_schedule_works_or_the_error_names_the_field(r, depth):
    schedule, message = attempt(lambda: DecreasingSchedule(r))
    if schedule is None:
        assert message.startswith("r: expected")
    else:
        assert sum(schedule.per_layer(depth)) == depth * schedule.r
