"""The script that measures a GPU, on a CPU with small models."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import re
import sys
import time
import types
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    sys.path.insert(0, str(SCRIPT.parent))  # as when the script runs
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
        parts = {"own": part, "next": lambda run: run.write("reached")}
        monkeypatch.setattr(gpu, "PARTS", {name: gpu.Part(own, 100, 1) for name, own in parts.items()})
        monkeypatch.setattr(gpu, "MORE_PARTS", {})
        code: object = None
        try:
            gpu.main(["--device", "cpu", "--out", str(tmp_path / "gpu.jsonl"), *arguments])
        except SystemExit as error:
            code = error.code
        return lines_of(tmp_path / "gpu.jsonl"), code

    return run


def lines_of(record: Path) -> list[dict[str, Any]]:
    """Return the lines of a record but those that say on which machine it was made."""
    lines = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["name"] != "machine"]


def on_gpu(gpu: ModuleType, name: str) -> Any:
    """Return a module of the script."""
    return importlib.import_module(f"on_gpu.{name}")


def quick(turn: int) -> dict[str, Any]:
    return {"ms": 1.0}


def names(lines: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(line["name"], line["status"]) for line in lines]


# The rounds of each variant in a tiny run, by part and measurement.
SINGLE = {"dense", "tomesd", "apply_patch", "ratio 0.5", "ToDo"}
WAYS = ("mask", "columns", "FlexAttention", "sorted groups")
STACKS = {f"stack {ratio}{way}" for ratio in (0.3, 0.5) for way in ("", *(f", {way}" for way in WAYS))}
STACKED = {"dense", "dense, cuDNN", "ratio 0.5", *STACKS}
ASKED = {"dense", "speed-up 2", "speed-up 3"}
GENERATIONS = ASKED | {
    *("half the steps", "a third of the steps"),
    *("speed-up 2, merging on all grids", "speed-up 3, merging on all grids"),
}
ROWS = {
    ("sd15", "sd15 128, batch 1, one step"): SINGLE,
    ("sd15", "sd15 128, batch 2, one step"): SINGLE,
    ("sd15", "sd15 128, generation"): GENERATIONS,
    ("flux", "flux 128, one step"): STACKED,
    ("flux", "flux 128, generation"): GENERATIONS,
    ("sd3", "sd3 128, one step"): STACKED,
    ("sd3", "sd3 128, generation"): GENERATIONS,
    ("wan", "wan 128, one step"): STACKED,
    ("wan", "wan 128, generation"): ASKED,
    ("graph", "sd15 128, one step as a CUDA graph"): SINGLE,
}
PLANS = ("float32", "half precision", "half precision, with the sort of the groups")
TIMED = {
    "env": {"versions", "ceilings"},
    "attention": {f"tiny: plan, {how}" for how in PLANS}
    | {f"tiny: merge, {how}" for how in ("embedding_bag", "index_add_")}
    | {f"tiny: {what}" for what in ("unmerge", "dense", "merged")}
    | {f"tiny: dense, {kernel}" for kernel in ("flash", "cuDNN", "efficient")}
    | {f"tiny: merged, proportional by {way}" for way in WAYS},
    "profile": {f"sd15 1024: {variant}" for variant in SINGLE}
    | {f"sd3 1024: {variant}" for variant in ("dense", "apply_patch", "ratio 0.5", "stack 0.5")},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_whole_run_on_small_models_has_every_row(
    gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "gpu.jsonl"
    arguments = ["--device", "cpu", "--tiny", "--out", str(record)]
    gpu.main(arguments)
    lines = lines_of(record)
    ended = [line for line in lines if line["name"] == "end"]
    assert [line["part"] for line in ended] == list(gpu.PARTS)
    assert all(line["complete"] for line in ended)
    assert [line for line in lines if line["status"] not in ("ok", "done")] == []
    found: dict[tuple[str, str], set[tuple[str, int]]] = {}
    for line in lines:
        if line.get("round"):
            name = line["name"].removesuffix(f": {line['variant']}")
            found.setdefault((line["part"], name), set()).add((line["variant"], line["round"]))
            assert line["ms"] > 0
    assert found == {key: {(one, turn) for one in own for turn in (1, 2)} for key, own in ROWS.items()}
    others = {(line["part"], line["name"]) for line in lines if "round" not in line}
    assert {(part, name) for part, names in TIMED.items() for name in names} <= others
    shown = capsys.readouterr().out
    assert "| FLUX.1, 1024 px, a stack at 0.5 | 1.60× | not measured |  |" in shown
    assert shown.count("one step") > 50

    record.write_text(record.read_text(encoding="utf-8") + '{"part": "graph", "na', encoding="utf-8")
    # The table of the page can be made of such a record, which has generations at the speed-ups alone.
    own = (
        record.read_text(encoding="utf-8")
        .replace("sd15 128", "sd15 512")
        .replace('"ms"', '"peak_mib": 1, "ms"')
    )
    (tmp_path / "own.jsonl").write_text(own, encoding="utf-8")
    made = gpu.page_tables({"one": [tmp_path / "own.jsonl"]}).splitlines()
    assert len(made) == 3
    assert made[2].startswith("| SD 1.5, 512 px, 20 steps | ")
    assert made[2].count("×") >= 2
    gpu.main(arguments)  # there is nothing left to do
    assert names(lines_of(record)) == [*names(lines), ("summary", "done")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_other_parts_run_on_small_models(gpu: ModuleType, tmp_path: Path) -> None:
    record = tmp_path / "gpu.jsonl"
    gpu.main(["--device", "cpu", "--tiny", "--out", str(record), "--parts", ",".join(gpu.MORE_PARTS)])
    lines = lines_of(record)
    assert [line["part"] for line in lines if line["name"] == "end"] == list(gpu.MORE_PARTS)
    assert [line for line in lines if line["status"] == "error"] == []
    assert (tmp_path / "gpu-emoji-unet.png").exists()
    timed = {(line["part"], line["variant"]) for line in lines if line.get("round")}
    assert {("sdxl", "DeepCache, every 2nd step"), ("compile", "speed-up 2")} <= timed


def test_all_parts_fit_into_ten_minutes(gpu: ModuleType) -> None:
    assert gpu.LIMIT + gpu.GRACE < 600
    assert sum(part.budget for part in gpu.PARTS.values()) <= gpu.LIMIT - 15  # the imports take some
    every = gpu.PARTS | gpu.MORE_PARTS
    assert all(part.expected <= part.budget for part in every.values())
    page = (SCRIPT.parents[1] / "docs" / "measuring-a-gpu.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \|", page, flags=re.MULTILINE)
    assert rows == [(name, f"{part.budget:g}", f"{part.expected:g}") for name, part in every.items()]


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


def test_without_time_each_part_is_left_out(run: Any) -> None:
    lines, _ = run(lambda run: pytest.fail("begun"), "--limit", "0")
    assert names(lines)[-5:-1] == [("part", "left out"), ("end", "done")] * 2
    assert not any(line["complete"] for line in lines if line["name"] == "end")


def test_each_line_is_on_the_disk_before_the_next_measurement(run: Any, tmp_path: Path) -> None:
    seen = []

    def part(run: Any) -> None:
        run.measure("first", lambda: {})
        run.measure("second", lambda: seen.extend(names(lines_of(tmp_path / "gpu.jsonl"))) or {})

    run(part)
    assert seen == [("first", "ok")]


def test_variants_are_timed_in_turns_and_one_that_fails_is_left_out(gpu: ModuleType, run: Any) -> None:
    def refuse(turn: int) -> Any:
        raise RuntimeError("refused")

    def part(run: Any) -> None:
        variants = {"dense": quick, "bad": refuse, "merged": quick}
        on_gpu(gpu, "clock").in_turns(run, "own", variants, 2, warm_up=True, steps=3)

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
        memory = {"peak_mib": 1000} if variant == "merged" else {}
        return json.dumps({**known, "round": turn, "ms": ms, **memory})

    rows = [("dense", 8.0), ("dense, cuDNN", 4.0), ("merged", 2.0)]
    text = [line(variant, 0, 99.0) for variant, _ in rows]  # the warm-up
    text += [line(variant, turn, turn * ms) for turn in (1, 2, 3) for variant, ms in rows]
    text += [json.dumps({"part": "own", "status": "error", "name": "a: b: other"}), ""]
    (tmp_path / "gpu.jsonl").write_text("\n".join(text), encoding="utf-8")
    assert gpu.table(tmp_path / "gpu.jsonl").splitlines()[2:] == [
        "| a: b | dense | 16.0 | 8.0 | 24.0 | 0.50 |  |",
        "| a: b | dense, cuDNN | 8.0 | 4.0 | 12.0 | 1.00 |  |",
        "| a: b | merged | 4.0 | 2.0 | 6.0 | 2.00 | 1.05 GB |",
    ]


def test_the_wanted_speedups_stand_beside_what_was_measured(gpu: ModuleType, tmp_path: Path) -> None:
    def line(measurement: str, variant: str, ms: float) -> str:
        known = {"part": "own", "status": "ok", "name": f"{measurement}: {variant}", "variant": variant}
        return json.dumps({**known, "round": 1, "ms": ms}) + "\n"

    rows = [
        ("sd15 1024, batch 1, one step", "ratio 0.5", 125),
        ("sd15 768, batch 8, one step", "ratio 0.5", 100),
        ("flux 1024, one step", "stack 0.5", 150),
        ("flux 1024, one step", "stack 0.5, sorted groups", 300),  # was tried, and nobody gets it
    ]
    text = [line(name, variant, ms) + line(name, "dense", 150) for name, variant, ms in rows]
    (tmp_path / "gpu.jsonl").write_text("".join(text), encoding="utf-8")
    assert gpu.acceptance(tmp_path / "gpu.jsonl").splitlines()[2:] == [
        "| SD 1.5, 1024 px, `ratio=0.5` | 1.20× | 1.20× | yes |",
        "| SD 1.5, 768 px, batch 8, `ratio=0.5` | 1.08× | 1.50× | yes |",
        "| FLUX.1, 1024 px, a stack at 0.5 | 1.60× | 1.00× | no |",
        "| Wan 2.1, 480p, a stack at 0.5 | 2.30× | not measured |  |",
        "| the slowest of ours | 0.98× | 1.00× (stack 0.5, flux 1024, one step) | yes |",
    ]
    with (tmp_path / "gpu.jsonl").open("a", encoding="utf-8") as file:
        file.write(line("flux 1024, generation", "speed-up 2", 200))
        file.write(line("flux 1024, generation", "dense", 100))
    assert gpu.acceptance(tmp_path / "gpu.jsonl").splitlines()[-5:] == [
        "| the slowest of ours | 0.98× | 0.50× (speed-up 2, flux 1024, generation) | no |",
        "",
        "Below 0.98× are:",
        "",
        "- speed-up 2, flux 1024, generation: 0.50×",
    ]


def test_a_run_that_was_killed_goes_on_with_what_is_missing(
    gpu: ModuleType, run: Any, tmp_path: Path
) -> None:
    measured: list[str] = []
    killed_at = ["merged 2"]

    def variant(name: str) -> Any:
        def measure(turn: int) -> dict[str, Any]:
            if f"{name} {turn}" in killed_at:
                raise KeyboardInterrupt
            measured.append(f"{name} {turn}")
            return {"ms": 1.0}

        return measure

    def part(run: Any) -> None:
        for name in ("first", "fails"):
            run.measure(name, lambda name=name: measured.append(name) or {"ms": 1 / (name == "first")})
        variants = {name: variant(name) for name in ("dense", "merged")}
        on_gpu(gpu, "clock").in_turns(run, "own", variants, 3)

    with pytest.raises(KeyboardInterrupt):
        run(part)
    assert measured == ["first", "fails", "dense 1", "merged 1", "dense 2"]
    measured.clear()
    killed_at.clear()
    with (tmp_path / "gpu.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"part": "own", "na')  # as the disk may have it
    lines, _ = run(part)
    # The round that was cut off runs whole, so that its variants are of one process.
    assert measured == ["dense 2", "merged 2", "dense 3", "merged 3"]
    assert names(lines).count(("fails", "error")) == 1
    measured.clear()
    run(part)
    assert measured == []
    run(part, "--retry")
    assert measured == ["fails"]


def test_what_was_left_out_is_measured_by_a_later_run(run: Any) -> None:
    run(lambda run: run.measure("long", lambda: pytest.fail("measured"), needs=101), "--limit", "1000")
    lines, _ = run(lambda run: run.measure("long", lambda: {}, needs=1), "--limit", "1000")
    assert [status for name, status in names(lines) if name == "long"] == ["left out", "ok"]


def test_a_record_of_another_machine_is_not_continued(run: Any, tmp_path: Path) -> None:
    run(lambda run: None)
    before = (tmp_path / "gpu.jsonl").read_bytes()
    _, code = run(lambda run: pytest.fail("begun"), "--tiny")
    assert (
        str(code) == f"{tmp_path / 'gpu.jsonl'} is the record of tiny False, and not True; give another --out"
    )
    assert (tmp_path / "gpu.jsonl").read_bytes() == before
    (tmp_path / "gpu.jsonl").write_text('{"part": "env", "name": "versions", "status": "ok"}\n')
    _, code = run(lambda run: pytest.fail("begun"))
    assert "is the record of an earlier script; give another --out" in str(code)


def test_without_a_gpu_one_line_says_what_is_missing(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as error:
        gpu.main(["--out", str(tmp_path / "gpu.jsonl")])
    assert re.fullmatch(
        r"no GPU: PyTorch \S+ finds no CUDA device; run this on a machine with one, or check the script here "
        "with --device cpu --tiny",
        str(error.value),
    )
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="diffusers is missing"):
        gpu.main(["--device", "cpu", "--out", str(tmp_path / "gpu.jsonl")])
    assert not (tmp_path / "gpu.jsonl").exists()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("images_differ", [False, True])
def test_each_way_of_proportional_attention_is_that_of_the_sizes(
    gpu: ModuleType, way: str, images_differ: bool
) -> None:
    noise = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, n, 16, generator=noise) for n in (12, 7, 7))
    sizes = torch.tensor([1.0, 4, 1, 2, 1, 2, 5]).expand(2, -1).clone()
    if images_differ:
        sizes[1, 3] = 9
    logits = query @ key.transpose(-1, -2) / 4 + sizes.log()[:, None, None]
    found = on_gpu(gpu, "biases").BIASES[way](query, key, value, sizes)
    torch.testing.assert_close(found, logits.softmax(-1) @ value, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_a_stack_has_the_same_result_with_each_way(gpu: ModuleType, tmp_path: Path) -> None:
    models, record = on_gpu(gpu, "models"), on_gpu(gpu, "record")
    options = {
        "device": "cpu",
        "tiny": True,
        "out": tmp_path / "a",
        "variants": [],
        "limit": 9,
        "retry": False,
    }
    run = record.Run(argparse.Namespace(**options), 0.0)
    loop = models.Loop(run, "flux", models.build(run, "flux", torch.float32), 128, 128)
    found = []
    for way in (None, *WAYS):
        with torch.no_grad(), on_gpu(gpu, "variants").stack(loop, 0.5, way) as patch:
            for step in range(3):
                patch.at_step(step, 28)
                result = loop.step(step)
            found.append(result)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-5)


class Event:
    """An event of CUDA, by the clock of the CPU."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, other: Event) -> float:
        return 1000 * (other.at - self.at)

    def synchronize(self) -> None:
        pass


@pytest.fixture
def pretended(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the script take a CPU for a GPU: a mistake in what only a GPU runs would cost its time."""
    record = on_gpu(gpu, "record")
    begin = record.Run.__init__

    def init(self: Any, *given: Any) -> None:
        begin(self, *given)
        self.on_gpu = True

    monkeypatch.setattr(record.Run, "__init__", init)
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "Event", Event)
    monkeypatch.setattr(cuda, "CUDAGraph", mock.MagicMock())
    monkeypatch.setattr(cuda, "graph", lambda graph: contextlib.nullcontext())
    monkeypatch.setattr(cuda, "max_memory_allocated", lambda: 2**30)
    card = types.SimpleNamespace(name="Pretended", total_memory=2**30)
    monkeypatch.setattr(cuda, "get_device_properties", lambda device: card)
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache", "set_sync_debug_mode"):
        monkeypatch.setattr(cuda, name, lambda *given: None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("pretended")
def test_what_only_a_gpu_runs_has_no_mistake(gpu: ModuleType, tmp_path: Path) -> None:
    parts = "env,attention,profile,sd3,graph"
    gpu.main(["--device", "cpu", "--tiny", "--out", str(tmp_path / "gpu.jsonl"), "--parts", parts])
    lines = lines_of(tmp_path / "gpu.jsonl")
    assert [line for line in lines if line["status"] == "error"] == []
    of_attention = [line for line in lines if line["part"] == "attention" and "ms" in line]
    assert {"ms", "queued_ms", "graph_ms", "calls"} <= set.intersection(*map(set, of_attention))
    timed = [line for line in lines if line["part"] == "sd3" and line.get("round")]
    assert {"ms", "queued_ms", "peak_mib"} <= set.intersection(*map(set, timed))
    assert "Pretended" in {line.get("card") for line in lines}
    assert " | 1.07 GB |" in gpu.table(tmp_path / "gpu.jsonl")


def test_a_way_that_no_attention_asks_for_is_an_error(gpu: ModuleType) -> None:
    using = on_gpu(gpu, "biases").using
    with pytest.raises(RuntimeError, match="no attention asked for its bias"), using("columns"):
        pass


def test_the_page_says_what_the_records_say(gpu: ModuleType) -> None:
    """If this fails: `python benchmarks/gpu.py --write`."""
    made = gpu.page_tables(gpu.CARDS)
    assert made.count("×") == 46 + 44
    assert f"<!-- measured -->\n{made}\n<!-- end of measured -->" in gpu.PAGE.read_text(encoding="utf-8")


def test_an_unknown_part_is_an_error(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FileNotFoundError):  # nothing was recorded
        run(lambda run: None, "--parts", "own,other")
    assert "no part other; there are own, next" in capsys.readouterr().err


def test_readme_says_what_the_page_of_the_records_says(gpu: ModuleType) -> None:
    """The page is written from the records."""
    readme = (SCRIPT.parent.parent / "README.md").read_text(encoding="utf-8")
    page = gpu.PAGE.read_text(encoding="utf-8")
    assert "| NVIDIA H200 | unchanged | `speedup=1.5` | `speedup=2.0` | `speedup=3.0` |" in readme
    models = ("FLUX.1, 1024 px, 28", "SDXL, 1024 px, 30", "SD 1.5, 512 px, 20", "SD3, 1024 px, 28")
    for model in models:
        row = next(line for line in page.splitlines() if line.startswith(f"| {model} steps | "))
        assert f"\n{' | '.join(row.split(' | ')[:5])} |\n" in readme
