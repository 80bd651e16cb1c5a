"""Settings in the parameters of an image are read back unchanged, wherever they stand."""

import json

import pytest
from tests.config.test_json_file import CONFIG

from tokenmerge import ConfigError, StepReuse, ToMeConfig, presets
from tokenmerge.config import dense_outside, read_metadata, to_metadata

CONFIGS = [
    ToMeConfig(),
    CONFIG,
    presets.sdtm(),
    ToMeConfig(reuse=StepReuse(full_steps=(0, 0.5, 1)), rules=dense_outside(0.1, 1)),
    ToMeConfig(ratio=0.25, rules=[{"start": 0.5, "scope": "block", "reuse.every": 1}]),
]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("method", ["", "auto", 'a file, {"version": 2}.json', "two\nlines"])
def test_settings_are_read_as_they_were_written(config, method):
    line = to_metadata(config, method)
    assert line.startswith("Token merging: ")
    assert len(line.splitlines()) == 1
    assert f" {config.ratio:g}, " in line
    assert read_metadata(line) == config


def test_the_line_is_found_in_a_longer_text():
    line = to_metadata(CONFIG, "auto")
    name, value = line.split(": ", 1)
    for text in (
        value,
        f"a castle\nSteps: 20, {line}, Seed: 1",
        f"Steps: 20, {name}: {json.dumps(value)}, X: y",
    ):
        assert read_metadata(text) == CONFIG


def test_a_prompt_that_speaks_of_token_merging_changes_nothing():
    assert read_metadata(f"Token merging: explained\nSteps: 2, {to_metadata(CONFIG)}") == CONFIG


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"metadata: expected a text with a line of patch\.metadata\(\), .* got ''"),
        (None, "metadata: expected a text .* got None"),
        ("Token merging ratio: 0.5", "metadata: expected a text"),
        ('Token merging: auto 0.5, {"version": 1, "settings": {', "metadata: expected a text"),
        ('Token merging: "auto 0.5, {\\"version', "metadata: expected a text"),
        ('Token merging: x, {"version": 2, "settings": {}}', "metadata: version: expected 1, .* got 2"),
        ('Token merging: x, {"version": 1, "settings": {"ratio": 2}}', "metadata: ratio: expected .* got 2"),
    ],
)
def test_another_text_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        read_metadata(text)
