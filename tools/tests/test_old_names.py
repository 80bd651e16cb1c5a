"""Old records and old command lines are read with the current names."""

import json
from pathlib import Path

import pytest

from tokenmerge import ConfigError, Correction, PlanSharing, Schedule, StepReuse, ToMeConfig, presets
from tokenmerge.config import NEW_NAMES, SETTINGS
from tokenmerge_tools.method_spec import MethodSpec, read_setting
from tokenmerge_tools.records.kinds import CellRecord
from tokenmerge_tools.variants.variant import parse_variant

RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.jsonl"))


def test_old_names_lead_to_settings():
    assert set(NEW_NAMES.values()) <= set(SETTINGS)


def test_old_and_new_spelling_are_one_config():
    old = {
        **{"schedule": [1.4, 0.6], "until": 0.8, "phases": {"0.5": {"planner": "tiled"}}},
        **{"plan_every": 2, "share_plan": True, "share_guidance": False, "correct_every": 3},
        **{"reuse_every": 4, "reuse_finest_every": 2, "reuse_finest_from": 0.25, "reuse_span": 0.5},
    }
    new = ToMeConfig(
        schedule=Schedule(ratio=(1.4, 0.6), until=0.8, phases={0.5: {"planner": "tiled"}}),
        plans=PlanSharing(every=2, blocks=True, guidance=False),
        correction=Correction(every=3),
        reuse=StepReuse(every=4, shallow_every=2, shallow_from=0.25, span=0.5),
    )
    assert ToMeConfig.from_dict(old) == new == ToMeConfig.from_dict(json.loads(json.dumps(new.to_dict())))
    assert ToMeConfig.from_dict({"schedule": None}) == ToMeConfig()


def test_a_setting_is_given_once():
    with pytest.raises(ConfigError, match=r"reuse\.every: given twice"):
        ToMeConfig.from_dict({"reuse_every": 2, "reuse": StepReuse()})


def test_old_names_on_the_command_line():
    assert read_setting("reuse_every=2") == read_setting("reuse.every=2") == ("reuse.every", 2)
    assert read_setting("schedule=1.4/0.6") == ("schedule.ratio", (1.4, 0.6))
    assert MethodSpec("toma", {"plan_every": 2}).config() == presets.toma(**{"plans.every": 2})
    (old,) = parse_variant("tome:share_plan,until=0.75", [0.5], {})
    assert old.label == "tome ratio=0.5 schedule.until=0.75 plans.blocks"
    assert [old] == parse_variant("tome:plans.blocks,schedule.until=0.75", [0.5], {})


def test_a_preset_keeps_the_rest_of_a_part():
    assert presets.sdtm(**{"schedule.until": 0.75}).schedule == Schedule(
        ratio=(1.4, 0.6), phases={0.4: {"planner": "tome"}}, until=0.75
    )
    assert presets.sdtm(schedule=Schedule(until=0.75)).schedule == Schedule(until=0.75)


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_every_recorded_config_can_be_read(file):
    for line in file.read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        if values["kind"] == "bench":
            record = CellRecord.from_dict(values)
            assert not record.conditions["settings"].keys() & NEW_NAMES.keys()
            assert not any(f" {name}" in f"{record.label} ".replace("=", " ") for name in NEW_NAMES)
            assert record.seconds or record.status != "ok"
            given = record.facts.get("config")
            if given is not None and given["scope"] == "stack":  # the record stays, and says what it measured
                assert "scope=stack" in record.label
                with pytest.raises(ConfigError, match=r"'stack' was removed \(docs/tried-and-removed\.md"):
                    ToMeConfig.from_dict(given)
            elif given is not None:
                assert ToMeConfig.from_dict(given).ratio == given["ratio"]
