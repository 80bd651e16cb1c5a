"""Saved settings are read back unchanged, and the error for a wrong file names the wrong setting."""

import json

import pytest

from tokenmerge import ConfigError, Correction, MergeSharing, StepReuse, ToMeConfig
from tokenmerge.config import load_config, save_config

CONFIG = ToMeConfig(
    ratio=0.4,
    max_downsample=2,
    scope="block",
    merge_sharing=MergeSharing(every=2, blocks=True),
    correction=Correction(every=3),
    reuse=StepReuse(every=4, shallow_every=2),
    rules=[
        {"level": 2, "ratio": 0.25, "seed": None},
        {"start": 0.5, "until": 0.8, "planner": "tiled"},
        {"until": 0.2, "ratio": 0, "reuse.every": 1},
    ],
)


@pytest.mark.parametrize("config", [ToMeConfig(), CONFIG], ids=["defaults", "all parts"])
def test_a_config_is_read_as_it_was_saved(config, tmp_path):
    file = tmp_path / "settings.json"
    save_config(config, file)
    assert load_config(file) == config
    assert json.loads(file.read_text())["version"] == 1


def test_a_file_may_name_a_few_settings(tmp_path):
    file = tmp_path / "settings.json"
    settings = {"reuse": {"every": 2}, "rules": [{"level": 2, "ratio": 0.25}]}
    file.write_text(json.dumps({"version": 1, "settings": settings}))
    assert load_config(file) == ToMeConfig(reuse=StepReuse(every=2), rules=[{"level": 2, "ratio": 0.25}])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read settings"),
        ("{", "cannot read settings"),
        ("[" * 100_000, "cannot read settings"),
        ("[]", r'content: expected an object with the keys "version" and "settings", or .* got \[\]'),
        ('{"version": 1}', r"content: expected .* got \['version'\]"),
        ('{"version": 2, "settings": {}}', "version: expected 1, .* got 2"),
        ('{"version": 1, "settings": []}', r"settings: expected settings by name, .* got \[\]"),
        ('{"version": 1, "settings": {"ratios": 0.5}}', "expected settings out of ratio, .* got 'ratios'"),
        ('{"version": 1, "settings": {"ratio": "0.5"}}', "ratio: expected a number from 0 .* got '0.5'"),
        ('{"version": 1, "settings": {"ratio": NaN}}', "ratio: expected a number from 0 .* got nan"),
        ('{"version": 1, "settings": {"ratio": 1e999}}', "ratio: expected a number from 0 .* got inf"),
        (
            '{"version": 1, "settings": {"ratio": 0.1, "ratio": 0.2}}',
            "'ratio': expected once, got it 2",
        ),
        (
            '{"version": 1, "settings": {"reuse": {"every": 0}}}',
            r"reuse\.every: expected a number ≥ 1, got 0",
        ),
        ('{"version": 1, "settings": {"reuse": 2}}', "expected settings out of ratio, .* got 'reuse'"),
        ('{"version": 1, "settings": {"levels": {}}}', "expected settings .* take rules instead of levels"),
    ],
)
def test_a_wrong_file_names_the_file_and_the_setting(text, message, tmp_path):
    (tmp_path / "tuned.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"tuned\.json: {message}"):
        load_config(tmp_path / "tuned.json")


def test_files_that_cannot_be_read_or_written(tmp_path):
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none.json", tmp_path, "a\0b", tmp_path / "bytes.json"):
        with pytest.raises(ConfigError, match="cannot read settings"):
            load_config(path)
    for path in (tmp_path, "/dev/full", tmp_path / "none" / "out.json", "a\0b"):
        with pytest.raises(ConfigError, match="cannot write settings"):
            save_config(ToMeConfig(), path)
