"""Old records and old command lines are read with the current names."""

import json
from pathlib import Path

import pytest

from tokenmerge import ConfigError, Correction, PlanSharing, StepReuse, ToMeConfig, presets
from tokenmerge.config import NEW_NAMES, REMOVED, SETTINGS, dense_outside
from tokenmerge_tools.method_spec import MethodSpec, read_setting
from tokenmerge_tools.records.kinds import CellRecord
from tokenmerge_tools.variants.variant import parse_variant

RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.jsonl"))


def test_old_names_lead_to_settings():
    assert set(NEW_NAMES.values()) <= {*SETTINGS, *REMOVED}


def test_old_and_new_spelling_are_one_config():
    old = {
        **{"schedule": [1.4, 0.6], "until": 0.8, "phases": {"0.5": {"planner": "tiled"}}},
        **{"plan_every": 2, "share_plan": True, "share_guidance": False, "correct_every": 3},
        **{"reuse_every": 4, "reuse_finest_every": 2, "reuse_finest_from": 0.0, "reuse_span": 1.0},
    }
    new = ToMeConfig(
        plans=PlanSharing(every=2, blocks=True, guidance=False),
        correction=Correction(every=3),
        reuse=StepReuse(every=4, shallow_every=2),
        rules=[{"start": 0.5, "planner": "tiled"}, *dense_outside(0, 0.8)],
    )
    read = ToMeConfig.from_dict(old)
    assert ToMeConfig.from_dict(json.loads(json.dumps(read.to_dict()))) == read
    # The ratio that changed from step to step is read as ten constant ones.
    assert [round(read.at_step(i, 10).ratio, 2) for i in range(8)] == [
        *(0.68, 0.64, 0.6, 0.56, 0.52, 0.48, 0.44, 0.4)
    ]
    del old["schedule"]
    assert ToMeConfig.from_dict(old) == new == ToMeConfig.from_dict(json.loads(json.dumps(new.to_dict())))
    assert ToMeConfig.from_dict({"schedule": None}) == ToMeConfig()


def test_former_levels_and_phases_are_rules():
    old = {
        "use_rand": False,
        "schedule": {"ratio": [1.0], "start": 0.1, "until": 1.0, "phases": {"0.5": {"ratio": 0.3}}},
        "levels": {"2": {"ratio": 0.2, "use_rand": True}},
    }
    assert ToMeConfig.from_dict(old) == ToMeConfig(
        seed=None,
        rules=[
            {"start": 0.5, "ratio": 0.3},
            {"level": 2, "ratio": 0.2},
            *dense_outside(0.1, 1),
        ],
    )


def test_a_setting_is_given_once():
    with pytest.raises(ConfigError, match=r"reuse\.every: given twice"):
        ToMeConfig.from_dict({"reuse_every": 2, "reuse": StepReuse()})


def test_old_names_on_the_command_line():
    assert read_setting("reuse_every=2") == read_setting("reuse.every=2") == ("reuse.every", 2)
    assert MethodSpec("toma", {"plan_every": 2}).config() == presets.toma(**{"plans.every": 2})
    (old,) = parse_variant("tome:share_plan", [0.5])
    assert old.label == "tome ratio=0.5 plans.blocks"
    assert [old] == parse_variant("tome:plans.blocks", [0.5])


def test_every_recorded_config_can_be_read():
    assert RESULTS
    refused: set[str] = set()
    for line in (line for file in RESULTS for line in file.read_text(encoding="utf-8").splitlines()):
        values = json.loads(line)
        if values["kind"] == "bench":
            record = CellRecord.from_dict(values)
            assert not record.conditions["settings"].keys() & NEW_NAMES.keys()
            assert not any(f" {name}" in f"{record.label} ".replace("=", " ") for name in NEW_NAMES)
            assert record.seconds or record.status != "ok"
            given = record.facts.get("config")
            if given is None:
                continue
            try:
                assert ToMeConfig.from_dict(given).ratio == given["ratio"]
            except ConfigError as error:  # the record stays, and says what it measured
                refused.add(str(error))
    assert all("was removed (docs/tried-and-removed.md" in error for error in refused)
