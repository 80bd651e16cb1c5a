"""The records that users sent, of which there may be none, have what a comparison needs."""

from pathlib import Path

import pytest

from tokenmerge_tools.records.file import read_results
from tokenmerge_tools.records.kinds import QualityRecord

FOLDER = Path(__file__).parents[2] / "benchmarks" / "community"
FEWEST_PROMPTS = 20


def check(file: Path) -> None:
    """Fail unless a file is a record as benchmarks/community/README.md asks for it."""
    found = read_results([file])
    assert not found.notes, found.notes
    whole = [record for record in found.quality if record.category is None]
    variants = {record.variant for record in whole}
    assert {"dense", "auto", "fewer-steps"} <= variants, f"{file} has only {', '.join(sorted(variants))}"
    for record in whole:
        conditions = record.conditions
        assert conditions["device"] != "cpu", f"{file}: drawn on {conditions['device']}"
        assert conditions["device_name"]
        assert conditions["versions"]["torch"]
        assert conditions["prompts"]["count"] >= FEWEST_PROMPTS, f"{file} has too few prompts"
        assert record.variant == "dense" or {"psnr", "ssim"} <= set(record.errors), f"{file} has no errors"
        assert {"seconds", "peak_bytes"} <= set(record.cost), f"{file} has no times or memory"


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.jsonl")), ids=lambda file: file.name)
def test_a_record_has_what_a_comparison_needs(file: Path) -> None:
    check(file)


def test_a_record_that_lacks_something_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tiny.jsonl"
    conditions = {"device": "cuda", "device_name": "H100", "versions": {"torch": "2.13"}}
    own = {
        "conditions": {**conditions, "prompts": {"count": 200, "key": ""}},
        "errors": {"psnr": 0.2, "ssim": 0.01},
        "cost": {"seconds": 4.0, "peak_bytes": 1.0},
    }

    def write(*variants: str, **changes: object) -> None:
        same = {"model": "m", "width": 64, "height": 64, "settings": {}, "figures": {}, "images": 200}
        records = [QualityRecord(**same, variant=variant, **{**own, **changes}) for variant in variants]
        file.write_text("".join(record.to_line() for record in records))

    write("dense", "auto", "fewer-steps")
    check(file)
    for variants, changes in (
        (("dense", "auto"), {}),
        (("dense", "auto", "fewer-steps"), {"errors": {}}),
        (("dense", "auto", "fewer-steps"), {"cost": {}}),
        (("dense", "auto", "fewer-steps"), {"conditions": {**own["conditions"], "device": "cpu"}}),
        (("dense", "auto", "fewer-steps"), {"conditions": {**own["conditions"], "prompts": {"count": 3}}}),
    ):
        write(*variants, **changes)
        with pytest.raises(AssertionError):
            check(file)
