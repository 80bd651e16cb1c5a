"""Old records are read with the current names of settings."""

import json
from pathlib import Path

from tokenmerge.config import SETTINGS
from tokenmerge.config.parts import REPLACED
from tokenmerge_tools.records.kinds import NEW_NAMES, CellRecord

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
