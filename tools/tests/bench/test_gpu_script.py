"""The script that measures a GPU, on a CPU with small models."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu"] = module  # for its dataclasses and patches
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the script with a part of its own, and return the lines of its record and its exit code."""

    def run(part: Any, *arguments: str) -> tuple[list[dict[str, Any]], object]:
        monkeypatch.setattr(
            gpu, "PARTS", {"own": (100, part), "next": (100, lambda run: run.write("reached"))}
        )
        code: object = None
        try:
            gpu.main(["--device", "cpu", "--out", str(tmp_path / "gpu.jsonl"), *arguments])
        except SystemExit as error:
            code = error.code
        return lines_of(tmp_path / "gpu.jsonl"), code

    return run


def lines_of(record: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]


def names(lines: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(line["name"], line["status"]) for line in lines]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_part_runs_on_small_models(gpu: ModuleType, tmp_path: Path) -> None:
    gpu.main(["--device", "cpu", "--tiny", "--out", str(tmp_path / "gpu.jsonl")])
    lines = lines_of(tmp_path / "gpu.jsonl")
    assert [line["part"] for line in lines if line["name"] == "end"] == list(gpu.PARTS)
    assert [line for line in lines if line["status"] == "error"] == []
    timed = {(line["part"], line["variant"]) for line in lines if line.get("round")}
    for part in ("sd15", "sdxl", "sd3", "flux", "wan"):
        assert {(part, name) for name in ("dense, flash", "dense, cuDNN", "speed-up 2", "ratio 0.5")} <= timed
    assert (tmp_path / "gpu-emoji-unet.png").exists()
    assert len(gpu.table(tmp_path / "gpu.jsonl").splitlines()) > 50


def test_a_measurement_that_fails_is_recorded_and_the_run_goes_on(run: Any) -> None:
    def part(run: Any) -> None:
        run.measure("fails", lambda: 1 / 0)
        run.measure("lacks", lambda: importlib.import_module("no_such_package"))
        run.measure("works", lambda: {"ms": 1.0})
        raise ValueError("the part itself fails")

    lines, code = run(part)
    assert names(lines)[:4] == [("fails", "error"), ("lacks", "absent"), ("works", "ok"), ("part", "error")]
    assert ("reached", "ok") in names(lines)
    assert "ZeroDivisionError" in lines[0]["error"]
    assert "1 / 0" in lines[0]["traceback"]
    assert code is None


def test_a_lost_device_ends_the_run(run: Any) -> None:
    def part(run: Any) -> None:
        def lost() -> dict[str, Any]:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        run.measure("loses", lost)

    lines, code = run(part)
    assert names(lines) == [("loses", "error"), ("summary", "done")]
    assert "illegal memory access" in str(code)


def test_what_does_not_fit_in_the_time_is_left_out(run: Any) -> None:
    def part(run: Any) -> None:
        run.measure("long", lambda: pytest.fail("measured"), needs=101)
        run.measure("short", lambda: {}, needs=1)

    lines, _ = run(part, "--limit", "100000")
    assert names(lines)[:2] == [("long", "left out"), ("short", "ok")]
    lines, _ = run(lambda run: pytest.fail("begun"), "--limit", "0")
    assert names(lines)[-5:-1] == [("part", "left out"), ("end", "done")] * 2


def test_each_line_is_on_the_disk_before_the_next_measurement(run: Any, tmp_path: Path) -> None:
    seen = []

    def part(run: Any) -> None:
        run.measure("first", lambda: {})
        run.measure("second", lambda: seen.extend(names(lines_of(tmp_path / "gpu.jsonl"))) or {})

    run(part)
    assert seen == [("first", "ok")]


def test_variants_are_timed_in_turns_and_one_that_fails_is_left_out(gpu: ModuleType, run: Any) -> None:
    def refuse() -> Any:
        raise RuntimeError("refused")

    def part(run: Any) -> None:
        variants = {"dense": gpu.contextlib.nullcontext, "bad": refuse, "merged": gpu.contextlib.nullcontext}
        gpu.in_turns(run, "own", variants, lambda: None, 2, steps=3)

    lines, _ = run(part)
    timed = [line for line in lines if "round" in line]
    assert [(line["variant"], line["round"]) for line in timed] == [
        (variant, turn) for turn in range(3) for variant in ("dense", "merged")
    ]
    assert all(line["steps"] == 3 and line["ms"] >= 0 for line in timed)
    assert names(lines).count(("own: bad", "error")) == 1


def test_speedups_are_over_the_fastest_dense_variant_of_a_round(gpu: ModuleType, tmp_path: Path) -> None:
    def line(variant: str, turn: int, ms: float) -> str:
        known = {"part": "own", "status": "ok", "name": f"a: b: {variant}", "variant": variant}
        return json.dumps({**known, "round": turn, "ms": ms})

    rows = [("dense", 8.0), ("dense, cuDNN", 4.0), ("merged", 2.0)]
    text = [line(variant, 0, 99.0) for variant, _ in rows]  # the warm-up
    text += [line(variant, turn, turn * ms) for turn in (1, 2, 3) for variant, ms in rows]
    text += [json.dumps({"part": "own", "status": "error", "name": "a: b: other"})]
    (tmp_path / "gpu.jsonl").write_text("\n".join(text), encoding="utf-8")
    assert gpu.table(tmp_path / "gpu.jsonl").splitlines()[2:] == [
        "| a: b | dense | 16.0 | 0.50 |",
        "| a: b | dense, cuDNN | 8.0 | 1.00 |",
        "| a: b | merged | 4.0 | 2.00 |",
    ]


def test_the_page_says_what_the_records_say(gpu: ModuleType) -> None:
    """If this fails: `python benchmarks/gpu.py --write`."""
    made = gpu.page_tables(gpu.CARDS)
    assert made.count("×") == 46 + 44
    assert f"<!-- measured -->\n{made}\n<!-- end of measured -->" in gpu.PAGE.read_text(encoding="utf-8")


def test_an_unknown_part_is_an_error(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FileNotFoundError):  # nothing was recorded
        run(lambda run: None, "--parts", "own,other")
    assert "no part other; there are own, next" in capsys.readouterr().err


def test_the_first_lines_of_readme_say_what_the_records_say(gpu: ModuleType) -> None:
    found = gpu.speedups(*gpu.CARDS["NVIDIA H200"])
    readme, page = (
        path.read_text(encoding="utf-8") for path in (SCRIPT.parent.parent / "README.md", gpu.PAGE)
    )
    heads = "unchanged | `speedup=1.5` | `speedup=2.0` | `speedup=3.0` | extra memory at `2.0`"
    assert f"| seconds on an NVIDIA H200 | {heads} |" in readme
    names = {
        "flux 1024": "FLUX.1, 1024 px, 28 steps",
        "sdxl 1024": "SDXL, 1024 px, 30 steps",
        "sd15 512": "SD 1.5, 512 px, 20 steps",
        "sd3 1024": "SD3, 1024 px, 28 steps",
    }
    for model, name in names.items():
        own = found[f"{model}, generation"]
        more = re.search(rf"^\| {name} .* (\d+ MB) \|$", page, flags=re.MULTILINE)[1]
        dense = own["dense"].ms / 1000
        seconds = [dense, *(dense / own[f"speed-up {speedup}"].speedup for speedup in ("1.5", "2", "3"))]
        cells = [f"{one:.{1 if dense > 2 else 2}f}" for one in seconds]
        assert f"\n| {name} | {' | '.join(cells)} | {more} |\n" in readme
