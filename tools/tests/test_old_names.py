"""Old records are read with the current names of settings."""

import json
from pathlib import Path

import pytest

from tokenmerge import ToMeConfig
from tokenmerge.config import SETTINGS
from tokenmerge.config.parts import REPLACED
from tokenmerge_tools.method_spec import read_setting
from tokenmerge_tools.records.kinds import NEW_NAMES, CellRecord, QualityRecord

RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.jsonl"))


def test_old_names_lead_to_settings_or_to_what_replaced_them():
    assert set(NEW_NAMES.values()) <= {*SETTINGS, *REPLACED}
    assert {*SETTINGS}.isdisjoint(REPLACED)
    assert {name for name in REPLACED.values() if "." in name} <= {*SETTINGS}


def test_every_record_is_read_with_the_current_names():
    lines = [line for file in RESULTS for line in file.read_text(encoding="utf-8").splitlines()]
    records = [CellRecord.from_dict(values) for values in map(json.loads, lines) if values["kind"] == "bench"]
    assert records
    for record in records:
        assert not record.conditions["settings"].keys() & NEW_NAMES.keys()
        assert not any(f" {name}" in f"{record.label} ".replace("=", " ") for name in NEW_NAMES)
        assert record.seconds or record.status != "ok"


def test_settings_of_an_old_record_of_images_have_the_current_names():
    line = {
        "kind": "quality",
        "model": "emoji-unet",
        "width": 128,
        "height": 128,
        "variant": "tome",
        "settings": {"ratio": 0.5, "plans.every": 4},
        "figures": {"psnr": 30.0},
        "images": 2,
        "config": {"ratio": 0.5, "plans": {"every": 4}},
    }
    record = QualityRecord.from_dict(line)
    assert record.settings == {"ratio": 0.5, "merge_sharing.every": 4}
    assert record.label == "tome ratio=0.5 merge_sharing.every=4"
    assert ToMeConfig.from_dict(record.config).merge_sharing.every == 4


def test_the_command_line_takes_a_former_name():
    with pytest.warns(DeprecationWarning, match=r"take merge_sharing\.every"):
        assert read_setting("plans.every=4") == ("merge_sharing.every", 4)
