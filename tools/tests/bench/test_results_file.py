from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from tokenmerge.errors import ConfigError
from tokenmerge_tools.records.file import RecordNotWrittenError, ResultsFile, read_lines, read_records
from tokenmerge_tools.records.kinds import (
    CellRecord,
    QualityRecord,
    SampleRecord,
    TuneRecord,
)

ROOT = Path(__file__).parents[3]


def cell(variant: str = "dense", **changes: object) -> CellRecord:
    conditions = {"variant": variant, "settings": {}, "model": "μodel"}
    return CellRecord(**{"conditions": conditions, "status": "ok", "seconds": (2.0, 1.0), **changes})


def test_what_is_appended_is_read_back_and_found_by_its_key(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    with ResultsFile(path, CellRecord) as file:
        file.append(cell("dense"))
        file.append(cell("tome", references={"dense": (3.0,)}, facts={"notes": ["α"]}, peak_bytes=5))
    with ResultsFile(path, CellRecord) as file:
        assert file.notes == []
        assert set(file.records) == {cell("dense").key, cell("tome").key}
        assert file.records[cell("tome").key] == cell(
            "tome", references={"dense": (3.0,)}, facts={"notes": ["α"]}, peak_bytes=5
        )


def test_of_equal_cells_the_last_counts(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with ResultsFile(path, CellRecord) as file:
        file.append(cell(status="error", message="lost", seconds=()))
        file.append(cell())
    with ResultsFile(path, CellRecord) as file:
        assert [found.status for found in file.records.values()] == ["ok"]


def test_each_cell_is_on_the_disk_before_the_next_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, sizes = tmp_path / "results.jsonl", []
    monkeypatch.setattr(os, "fsync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    with ResultsFile(path, CellRecord) as file:
        file.append(cell("dense"))
        file.append(cell("tome"))
    lengths = [len(cell(name).to_line().encode()) for name in ("dense", "tome")]
    assert sizes == [lengths[0], sum(lengths)]


@pytest.mark.parametrize("torn", [cell("tome").to_line()[:-9], "\0\0\0", '{"kind": "ben\n'])
def test_a_torn_last_line_is_kept_aside_and_the_run_goes_on(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(cell("dense").to_line() + torn, encoding="utf-8")
    notes: list[str] = []
    assert [found.label for found in read_records(path, CellRecord, notes=notes)] == ["dense"]
    assert "is incomplete" in notes[0]
    with ResultsFile(path, CellRecord) as file:
        assert "results.jsonl.torn" in file.notes[0]
        file.append(cell("oracle"))
    assert [found.label for found in read_records(path, CellRecord)] == ["dense", "oracle"]
    assert (tmp_path / "results.jsonl.torn").read_text(encoding="utf-8").startswith(torn)


def test_a_whole_record_that_only_lacks_its_newline_counts(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(cell("dense").to_line().rstrip("\n"), encoding="utf-8")
    with ResultsFile(path, CellRecord) as file:
        file.append(cell("tome"))
    assert [found.label for found in read_records(path, CellRecord)] == ["dense", "tome"]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("a note\nand more", "line 1"),
        ('{"kind": "bench"}\n', "line 1"),
        ('{"a": 1}\n[]\n{"b": 2}\n', "line 2"),
    ],
)
def test_a_file_with_something_else_in_it_is_refused_and_left_alone(
    tmp_path: Path, text: str, where: str
) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=where):
        ResultsFile(path, CellRecord)
    assert path.read_text(encoding="utf-8") == text
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("end", ["", "\n", '\n{"kind": "bench"'])
@pytest.mark.parametrize("begin", ["[", '{"a": '])
def test_a_line_that_is_nested_too_deep_is_refused_and_left_alone(
    tmp_path: Path, begin: str, end: str
) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(cell().to_line() + begin * 100_000 + "1" + ("]" if begin == "[" else "}") * 100_000 + end)
    before = path.read_bytes()
    for read in (lambda: list(read_records(path, CellRecord)), lambda: ResultsFile(path, CellRecord)):
        with pytest.raises(ConfigError, match=r"line 2 of .* is not a JSON object"):
            read()
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seconds": []}, "expected at least one for status ok, got none"),
        ({"seconds": [0.0]}, "expected times above 0, got 0"),
        ({"seconds": [10**400]}, "not a bench record"),
        ({"seconds": [1.0], "references": {"dense": [-1.0]}}, "expected times above 0, got -1"),
    ],
)
def test_a_finished_cell_without_times_is_refused(tmp_path: Path, changes: dict, message: str) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps({**json.loads(cell().to_line()), **changes}) + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"line 1: .*{message}"):
        list(read_records(path, CellRecord))


def test_every_record_in_the_repository_is_read_and_written_as_it_was() -> None:
    kinds = {kind.KIND: kind for kind in (CellRecord, QualityRecord, SampleRecord, TuneRecord)}
    found: Counter[str] = Counter()
    for path in (path for folder in ("benchmarks", "docs") for path in (ROOT / folder).rglob("*.jsonl")):
        lines = [values for _, values in read_lines(path)]
        assert lines, path
        records = list(read_records(path, *kinds.values()))
        assert [record.KIND for record in records] == [v["kind"] for v in lines if v.get("kind") in kinds]
        for record in records:
            again = type(record).from_dict(json.loads(record.to_line()))
            assert (again, again.key) == (record, record.key), path
            assert record.label.startswith(getattr(record, "variant", "")), path
            found[record.KIND] += 1
    assert found["bench"] > 300
    assert found["quality"] > 500
    assert found["sample"] > 1500


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device")
def test_a_device_or_a_pipe_is_neither_read_nor_written(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    for path in (Path("/dev/full"), pipe):
        with pytest.raises(ConfigError, match=rf"out: cannot write to {path} \(it is not a regular file\)"):
            ResultsFile(path, CellRecord)
        with pytest.raises(ConfigError, match=rf"cannot read {path} \(it is not a regular file\)"):
            list(read_lines(path))


class FullDisk:
    """A file that takes ``room`` bytes, and then fails like a full disk, or with ``lost`` like a lost one."""

    def __init__(self, file: object, room: int, lost: bool = False) -> None:
        self.file, self.room, self.lost = file, room, lost

    def truncate(self, size: int) -> int:
        if self.lost:
            raise OSError(5, "Input/output error")
        return self.file.truncate(size)

    def __getattr__(self, name: str) -> object:
        return getattr(self.file, name)

    def write(self, data: memoryview) -> int:
        if self.room == 0:
            raise OSError(28, "No space left on device")
        part = bytes(data[: self.room])
        self.room -= len(part)
        return self.file.write(part)


def test_a_full_disk_loses_no_finished_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, elsewhere = tmp_path / "results.jsonl", tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
    with ResultsFile(path, CellRecord) as file:
        file.append(cell("dense"))
        file._file = FullDisk(file._file, room=10)
        with pytest.raises(RecordNotWrittenError, match=r"No space left.* the 1 records in it are safe"):
            file.append(cell("tome"))
    assert path.read_text(encoding="utf-8") == cell("dense").to_line()
    (saved,) = elsewhere.iterdir()
    assert [found.label for found in read_records(saved, CellRecord)] == ["tome"]


def test_a_lost_disk_leaves_a_torn_line_and_the_cell_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, elsewhere = tmp_path / "results.jsonl", tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
    with ResultsFile(path, CellRecord) as file:
        file.append(cell("dense"))
        file._file = FullDisk(file._file, room=10, lost=True)
        with pytest.raises(RecordNotWrittenError, match="No space left"):
            file.append(cell("tome"))
    (saved,) = elsewhere.iterdir()
    assert [found.label for found in read_records(saved, CellRecord)] == ["tome"]
    with ResultsFile(path, CellRecord) as file:
        assert "is incomplete" in file.notes[0]
        assert set(file.records) == {cell("dense").key}


@pytest.mark.parametrize("end", ['{"kind"', ""])
def test_a_disk_that_is_full_from_the_start_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(cell("dense").to_line().rstrip("\n") + ("\n" + end if end else ""), encoding="utf-8")
    before, original = path.read_bytes(), Path.open

    def full(self: Path, *arguments: object, **named: object) -> FullDisk:
        return FullDisk(original(self, *arguments, **named), room=0)

    monkeypatch.setattr(FullDisk, "__enter__", lambda self: self, raising=False)
    monkeypatch.setattr(FullDisk, "__exit__", lambda self, *_: self.file.close(), raising=False)
    monkeypatch.setattr(Path, "open", full)
    monkeypatch.setattr(Path, "read_bytes", lambda self: before)
    with pytest.raises(ConfigError, match=r"out: cannot write .*No space left.*free some space"):
        ResultsFile(path, CellRecord)
    monkeypatch.undo()
    assert path.read_bytes() == before


def test_where_no_file_can_be_locked_the_run_goes_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl")

    def flock(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with ResultsFile(tmp_path / "results.jsonl", CellRecord) as file:
        file.append(cell())
        assert "cannot be locked here (No locks available)" in file.notes[0]


def test_where_nothing_can_be_written_the_message_holds_the_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with ResultsFile(tmp_path / "results.jsonl", CellRecord) as file:
        file._file = FullDisk(file._file, room=0)
        with pytest.raises(RecordNotWrittenError) as error:
            file.append(cell("tome"))
    text = str(error.value)
    values, _ = json.JSONDecoder().raw_decode(text[text.index("{") :])
    assert CellRecord.from_dict(values) == cell("tome")


def test_two_runs_do_not_share_a_file(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    path = tmp_path / "results.jsonl"
    with ResultsFile(path, CellRecord), pytest.raises(ConfigError, match="another run"):
        ResultsFile(path, CellRecord)
    ResultsFile(path, CellRecord).__exit__(None, None, None)


def test_a_folder_is_not_a_results_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--out"):
        ResultsFile(tmp_path, CellRecord)
    with pytest.raises(ConfigError, match="cannot read"):
        list(read_lines(tmp_path / "missing.jsonl"))


def test_speedup_is_dense_over_variant_in_the_same_rounds() -> None:
    references = {"dense": (4.0, 6.0, 5.0), "dense, same attention": (8.0,)}
    record = cell("tome", seconds=(2.0, 2.5, 9.0), references=references)
    assert record.median == 2.5
    assert record.speedup == 2.0
    assert record.speedup_same_attention == pytest.approx(3.2)
    assert cell("tome").speedup is None
    assert cell("tome", references={"dense": (4.0,)}, seconds=()).speedup is None


def test_quartiles_of_one_figure_are_that_figure() -> None:
    assert cell("tome", seconds=(2.0,)).iqr == (2.0, 2.0)
    assert cell("tome", seconds=(1.0, 3.0)).iqr == (1.5, 2.5)


def test_figures_that_json_does_not_know_are_not_written() -> None:
    with pytest.raises(ValueError, match="JSON"):
        cell(seconds=(float("nan"),)).to_line()
