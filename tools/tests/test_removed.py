"""What was tried and removed: files of an earlier version are read, or an error names the page about it."""

import json
from pathlib import Path

import pytest

from tokenmerge import ConfigError, ToMeConfig, apply_token_merging
from tokenmerge.config import REMOVED, REMOVED_VALUES, SETTINGS, load_config
from tokenmerge_tools.method_spec import read_setting
from tokenmerge_tools.variants.variant import parse_variant

PAGE = r"docs/tried-and-removed\.md"
EXAMPLES = [
    {"blend": 0.5},
    {"clusters": 8},
    {"repeat_penalty": 0.02},
    {"correction.steps": (0.0, 0.5)},
    {"reuse.ends": "free"},
    {"reuse.spacing": 0.5},
    {"reuse.start": 0.4},
    {"reuse.shallow_from": 0.4},
    {"reuse.shallow_until": 0.9},
    {"reuse.span": 0.2},
    *({name: value} for name, values in REMOVED_VALUES.items() for value in values),
]
EACH = pytest.mark.parametrize("settings", EXAMPLES, ids=str)


def test_there_is_an_example_of_everything_that_was_removed():
    assert {name for settings in EXAMPLES for name in settings} == {*REMOVED, *REMOVED_VALUES}
    assert not REMOVED.keys() & set(SETTINGS)
    assert set(REMOVED_VALUES) <= set(SETTINGS)


@EACH
def test_a_file_that_uses_it_is_refused_and_patches_nothing(settings, tmp_path):
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"version": 1, "settings": {"ratio": 0.5, **settings}}))
    (name,) = settings
    with pytest.raises(ConfigError, match=rf"settings\.json: {name}: .* was removed \({PAGE}"):
        apply_token_merging(object(), path)


@EACH
def test_so_are_presets_levels_phases_and_the_command_line(settings):
    for changed in ({"levels": {2: settings}}, {"schedule.phases": {0.5: settings}}):
        if not any("." in name for name in settings):  # a part cannot change there
            with pytest.raises(ConfigError, match=PAGE):
                ToMeConfig.from_dict(changed)
    ((name, value),) = settings.items()
    with pytest.raises(ConfigError, match=PAGE):
        ToMeConfig.from_dict(dict([read_setting(f"{name}={value}")]))
    with pytest.raises(ConfigError, match=PAGE):
        parse_variant(f"tome:{name}={value}", [0.5])


def test_so_is_a_function_as_the_factor_of_the_ratio():
    with pytest.raises(ConfigError, match=rf"schedule\.ratio: .* was removed \({PAGE}.*write rules"):
        ToMeConfig.from_dict({"schedule.ratio": lambda done: 1.4 - 0.8 * done})


def test_a_file_in_which_it_does_nothing_is_read(tmp_path):
    path = tmp_path / "settings.json"
    idle = {name: values[0] for name, values in REMOVED.items()}
    path.write_text(json.dumps({"version": 1, "settings": {"ratio": 0.4, **idle}}))
    assert load_config(path) == ToMeConfig(ratio=0.4)


def test_the_page_is_there_and_names_each():
    text = (Path(__file__).parents[2] / "docs" / "tried-and-removed.md").read_text(encoding="utf-8")
    words = [*REMOVED, *(value for values in REMOVED_VALUES.values() for value in values)]
    assert [word for word in words if word not in text] == []
