from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tokenmerge import ToMeConfig
from tokenmerge.api import Patch
from tokenmerge.errors import ConfigError
from tokenmerge.planners import PLANNERS
from tokenmerge.plans import pays_from
from tokenmerge.report import predict
from tokenmerge_tools.bench import prepare as prepare_module
from tokenmerge_tools.bench import runner
from tokenmerge_tools.bench.loaded_model import GEOMETRIES, build_denoiser
from tokenmerge_tools.records.file import RecordNotWrittenError, ResultsFile, read_records
from tokenmerge_tools.records.kinds import CellRecord
from tokenmerge_tools.timing import interleaved

CPU = torch.device("cpu")
Measure = Callable[..., list[CellRecord]]


def names(records: list[CellRecord]) -> list[str]:
    return [f"{record.label} {record.conditions['attention']}" for record in records]


def test_every_cell_becomes_a_record_with_all_its_conditions(measure: Measure, tmp_path: Path) -> None:
    records = measure(variants=("tome",), ratio=(0.25, 0.5), batch=(1, 2), threads=1)
    assert names(records) == ["dense sdpa", "tome ratio=0.25 sdpa", "tome ratio=0.5 sdpa"] * 2
    assert [record.conditions["batch"] for record in records] == [1] * 3 + [2] * 3
    assert list(read_records(tmp_path / "results.jsonl", CellRecord)) == records
    lines = (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["bench"] * 6
    for record in records:
        assert record.status == "ok"
        assert len(record.seconds) == 2
        assert record.speedup == pytest.approx(
            sum(record.references["dense"]) / sum(record.seconds)
        )  # of two figures the median is the mean
        assert record.facts["samples"] == 2 * record.conditions["batch"]
        assert "random weights" in record.facts["notes"]
    conditions = records[1].conditions
    assert conditions["threads"] == 1
    assert conditions["dtype"] == "fp32"
    assert conditions["device"] == "cpu"
    assert conditions["environment"]["versions"]["torch"] == torch.__version__
    assert {"seed", "commit", "rounds", "warmup", "steps", "scheduler", "guidance"} <= set(conditions)
    assert records[1].facts["flops_merged"] < records[1].facts["flops_dense"]
    assert records[1].facts["config"]["sx"] == 2


def test_cells_take_turns_after_their_warm_up(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def spy(calls: dict, repeat: int, device: torch.device) -> object:
        for measured in interleaved(calls, repeat, device):
            order.append(measured.variant)
            yield measured

    monkeypatch.setattr(runner, "interleaved", spy)
    runs: list[prepare_module.PreparedCell] = []
    original = prepare_module.PreparedCell.run
    monkeypatch.setattr(prepare_module.PreparedCell, "run", lambda self: (runs.append(self), original(self)))
    measure(variants=("tome", "sito"), rounds=3, warmup=2)
    assert order == ["dense, sdpa", "tome ratio=0.5, sdpa", "sito ratio=0.5, sdpa"] * 3
    assert runs == runs[:3] * 5
    assert len(runs) == 3 * (2 + 3)


def test_a_continued_run_measures_only_what_is_missing(measure: Measure) -> None:
    first = measure(variants=("tome",), attention=("default",))
    again = measure(variants=("tome",), attention=("default",))
    assert again == first
    more = measure(variants=("tome", "sito"), attention=("default",))
    assert more[:3] == first
    assert names(more[3:]) == ["sito ratio=0.5 default"]
    # The dense cells of the comparison ran again, but got no records.
    assert more[3].references["dense, same attention"] != first[1].seconds
    assert set(more[3].references) == {"dense", "dense, same attention"}


@pytest.mark.slow
def test_other_conditions_are_other_cells(measure: Measure) -> None:
    first = measure(variants=("dense",))
    threads = {"threads": torch.get_num_threads() + 1}
    for change in ({"seed": 1}, {"rounds": 3}, threads, {"warmup": 2}, {"size": ("128x64",)}):
        (record,) = measure(variants=("dense",), **change)
        assert record.key != first[0].key, change


def test_a_run_that_is_killed_keeps_its_finished_cells(
    measure: Measure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(progress: runner.CellProgress) -> None:
        if progress.number == 2:
            raise KeyboardInterrupt

    grid = {"model": ("geometry:tiny",), "rounds": 1, "device": "cpu", "variants": ("tome", "sito")}
    with pytest.raises(KeyboardInterrupt):
        runner.run_grid(runner.BenchOptions(**grid), tmp_path / "results.jsonl", interrupted)
    kept = list(read_records(tmp_path / "results.jsonl", CellRecord))
    assert names(kept) == ["dense sdpa", "tome ratio=0.5 sdpa"]
    records = measure(rounds=1, variants=("tome", "sito"))
    assert records[:2] == kept
    assert names(records[2:]) == ["sito ratio=0.5 sdpa"]


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = {path!r}
from tools.tests.bench import conftest
from tokenmerge_tools.bench import runner
from tokenmerge_tools.bench.grid import BenchOptions

conftest.GEOMETRIES["tiny"] = conftest.tiny_geometry()
runner.source_commit = lambda: None
interleaved, calls = runner.interleaved, []

def until_killed(*arguments):
    for measured in interleaved(*arguments):
        yield measured
        calls.append(measured.variant)
        if len(calls) == {calls}:
            os.kill(os.getpid(), signal.SIGKILL)

runner.interleaved = until_killed
runner.run_grid(BenchOptions(**{axes!r}), Path({out!r}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no such signal")
@pytest.mark.parametrize(
    ("axes", "calls", "left"),
    [({"variants": ("tome", "sito"), "rounds": 3}, 7, 9 - 7)],  # killed in the last round
)
def test_a_kill_loses_no_timed_call(
    measure: Measure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, axes: dict, calls: int, left: int
) -> None:
    out = tmp_path / "results.jsonl"
    # The child imports the same package and tests.
    grid = {"model": ("geometry:tiny",), "device": "cpu", **axes}
    script = KILLED.format(path=sys.path, calls=calls, axes=grid, out=str(out))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    before = [json.loads(line) for line in (tmp_path / "results.jsonl.unfinished").read_text().splitlines()]

    again: list[str] = []

    def counted(*arguments: object) -> object:
        for measured in interleaved(*arguments):
            again.append(measured.variant)
            yield measured

    monkeypatch.setattr(runner, "interleaved", counted)
    records = measure(**axes)
    assert len(again) == left
    assert {record.status for record in records} == {"ok"}
    assert {len(record.seconds) for record in records} == {axes["rounds"]}
    kept = {seconds for record in records for times in record.references.values() for seconds in times}
    kept |= {seconds for record in records for seconds in record.seconds}
    assert {seconds for _, seconds, _ in before} <= kept
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]


def test_out_of_memory_is_a_cell_that_says_so(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def fails_in_the_second_round(self: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:  # one warm-up, two rounds
            raise MemoryError

    original = prepare_module.CellBuilder.prepare

    def prepare(self: prepare_module.CellBuilder, column: object) -> prepare_module.PreparedCell:
        cell = original(self, column)
        if column.spec.name == "sito":
            cell.call = lambda: fails_in_the_second_round(None)
        return cell

    monkeypatch.setattr(prepare_module.CellBuilder, "prepare", prepare)
    dense, sito, tome = sorted(
        measure(variants=("sito", "tome")), key=lambda record: record.conditions["variant"]
    )
    assert (sito.status, sito.seconds, sito.speedup) == ("oom", (), None)
    assert sito.message
    assert dense.status == tome.status == "ok"
    assert len(tome.seconds) == 2


def test_a_cell_that_fails_in_its_warm_up_is_recorded_before_the_next_cell_runs(
    measure: Measure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out, original = tmp_path / "results.jsonl", prepare_module.CellBuilder.prepare
    recorded: list[list[str]] = []

    def prepare(self: prepare_module.CellBuilder, column: object) -> prepare_module.PreparedCell:
        cell = original(self, column)
        if column.spec.name == "tome":
            cell.call = lambda: [][0]
        if column.spec.name == "sito":
            cell.call = lambda: recorded.append(names(list(read_records(out, CellRecord))))
        return cell

    monkeypatch.setattr(prepare_module.CellBuilder, "prepare", prepare)
    records = measure(variants=("tome", "sito"), rounds=1)
    assert recorded[0] == ["tome ratio=0.5 sdpa"]
    assert [record.status for record in records] == ["error", "ok", "ok"]


def test_a_dense_cell_that_failed_half_way_is_no_reference(
    measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = prepare_module.CellBuilder.prepare

    def prepare(self: prepare_module.CellBuilder, column: object) -> prepare_module.PreparedCell:
        cell = original(self, column)
        if str(column) == "dense, default":
            turns = iter([None, None])  # the warm-up and the first round
            cell.call = lambda: next(turns)
        return cell

    monkeypatch.setattr(prepare_module.CellBuilder, "prepare", prepare)
    records = measure(variants=("tome",), attention=("default",))
    (merged,) = [record for record in records if record.conditions["variant"] == "tome"]
    assert set(merged.references) == {"dense"}
    assert merged.speedup_same_attention is None


def test_an_unexpected_failure_is_a_cell_and_is_tried_again(
    measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no kernel\nfor this")

    with monkeypatch.context() as patched:
        patched.setattr(prepare_module, "predict", broken)
        records = measure(variants=("tome",))
    assert [record.status for record in records] == ["error", "ok"]  # a cell that fails ends first
    assert records[0].message == "RuntimeError: no kernel for this"
    again = measure(variants=("tome",))
    assert sorted((record.label, record.status) for record in again) == [
        ("dense", "ok"),
        ("tome ratio=0.5", "ok"),
    ]
    assert len(measure(variants=("tome",))) == 2


def test_a_model_that_cannot_be_loaded_is_rows_that_say_why(
    measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(**arguments: object) -> None:
        raise ConfigError("model: cannot load it: the hub is down")

    with monkeypatch.context() as patched:
        patched.setattr(runner, "load_model", load)
        records = measure(variants=("tome",))
    assert [record.status for record in records] == ["error"] * 2
    assert "the hub is down" in records[0].message
    assert [record.status for record in measure(variants=("tome",))] == ["ok"] * 2  # it is tried again


def test_what_is_not_installed_is_rows_that_say_so(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    records = measure(variants=("tomesd",), attention=("xformers",))
    by_name = dict(zip(names(records), records, strict=True))
    assert "pip install tomesd" in by_name["tomesd ratio=0.5 xformers"].message
    assert "pip install xformers" in by_name["dense xformers"].message
    assert by_name["dense sdpa"].status == "ok"


def test_a_full_disk_ends_the_run_with_the_finished_cells_in_the_file(
    measure: Measure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original = ResultsFile.append

    def append(self: ResultsFile, record: CellRecord) -> None:
        if record.conditions["variant"] == "sito":
            raise RecordNotWrittenError("the disk is full")
        original(self, record)

    monkeypatch.setattr(ResultsFile, "append", append)
    with pytest.raises(RecordNotWrittenError):
        measure(variants=("tome", "sito"))
    assert names(list(read_records(tmp_path / "results.jsonl", CellRecord))) == [
        "dense sdpa",
        "tome ratio=0.5 sdpa",
    ]


def test_every_call_plans(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each half of guidance has its own plan, as a denoiser alone does not know of guidance."""
    images: list[int] = []
    plan_tome = PLANNERS["tome"]

    def counted(features: torch.Tensor, *args: object) -> object:
        if not features.is_meta:  # as it is for the report
            images.append(len(features))
        return plan_tome(features, *args)

    monkeypatch.setitem(PLANNERS, "tome", counted)
    measure(variants=("tome",), steps=1, warmup=1, rounds=2)
    assert images == [2] * 3 * 3  # a warm-up and two rounds of three blocks


def test_settings_that_follow_the_steps_are_timed_over_a_generation(
    measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    at_step = Patch.at_step
    monkeypatch.setattr(
        Patch, "at_step", lambda self, i, steps: (told.append((i, steps)), at_step(self, i, steps))
    )

    def paced(calls: dict, repeat: int, device: torch.device) -> object:
        for measured in interleaved(calls, repeat, device):
            seconds = {"dense, sdpa": 1.0}.get(measured.variant, 3.0)
            yield dataclasses.replace(measured, seconds=seconds, peak_bytes=None)

    monkeypatch.setattr(runner, "interleaved", paced)
    _, merged = measure(variants=('tome:rules=[{"start": 0.5, "ratio": 0}]',), steps=4, rounds=2)
    assert told == [(i, 4) for i in range(4)] * 3  # a warm-up, two rounds
    assert merged.seconds == (3.0 / 4,) * 2
    assert merged.speedup == pytest.approx(4 / 3)
    assert any("mean over the 4 calls of a generation" in note for note in merged.facts["notes"])
    report = predict(build_denoiser(GEOMETRIES["tiny"], torch.float32, CPU, 0), ToMeConfig(), 8, 8, 2)
    assert merged.facts["flops_merged"] == (report.flops_merged + report.flops_dense) / 2


@pytest.mark.parametrize("compiled", [False, True])
def test_auto_follows_the_steps_unless_it_is_compiled(
    measure: Measure, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    monkeypatch.setattr("tokenmerge.default_method.fewest_tokens", lambda *_: pays_from(64))
    monkeypatch.setattr(nn.Module, "compile", lambda self, dynamic: None)
    records = measure(variants=("auto",), steps=10, rounds=1, warmup=1, compile=(compiled,))
    (auto,) = [record for record in records if record.conditions["variant"] == "auto"]
    assert (auto.status, auto.message) == ("ok", "")
    assert (auto.facts["config"]["reuse"]["every"] == 1) == compiled
    assert any("calls of a generation" in note for note in auto.facts["notes"]) != compiled
    assert any(re.fullmatch("plan: [MDsC·]{10}", note) for note in auto.facts["notes"]) != compiled


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"variants": ("ibtm",)}, "tokenmerge evaluate times it"),
        ({"variants": ("ca_tome",), "compile": (True,)}, "cannot be compiled"),
    ],
)
def test_what_cannot_be_timed_honestly_is_a_row_that_says_why(
    measure: Measure, axes: dict, words: str
) -> None:
    cells = [record for record in measure(**axes) if record.conditions["variant"] != "dense"]
    assert [(cell.status, words in cell.message) for cell in cells] == [("unavailable", True)]


def test_compiled_cells_are_compared_with_compiled_dense(
    measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[nn.Module] = []

    def compile(model: nn.Module, dynamic: bool) -> nn.Module:
        assert not dynamic
        compiled.append(model)
        return model

    monkeypatch.setattr(torch, "compile", compile)
    calls: list[prepare_module.PreparedCell] = []
    original = prepare_module.PreparedCell.run
    monkeypatch.setattr(prepare_module.PreparedCell, "run", lambda self: (calls.append(self), original(self)))
    records = measure(variants=("tome",), compile=(False, True), warmup=1)
    assert len(calls) == 4 * (3 + 2)
    assert [(record.label, record.conditions["compile"]) for record in records] == [
        ("dense", False),
        ("dense", True),
        ("tome ratio=0.5", False),
        ("tome ratio=0.5", True),
    ]
    assert len(compiled) == 2
    assert records[3].references["dense"] == records[1].seconds


@pytest.mark.parametrize(
    "axes",
    [{"model": ("geometry:none",)}, {"size": ("65x64",)}, {"device": "cuda:99"}, {"dtype": ("fp32", "fp16")}],
)
def test_what_does_not_fit_is_refused_before_anything_is_measured(
    measure: Measure, tmp_path: Path, axes: dict
) -> None:
    with pytest.raises(ConfigError):
        measure(**axes)
    assert list(tmp_path.iterdir()) == []
