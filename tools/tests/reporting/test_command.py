from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from tools.tests.reporting.made import EVIL, cell, grid_of_cells, write_all
from typer.testing import CliRunner

from tokenmerge.errors import ConfigError
from tokenmerge_tools.cli.report import report
from tokenmerge_tools.records.file import UnfinishedCells
from tokenmerge_tools.records.kinds import Record, TuneRecord

app = typer.Typer()
app.command()(report)


def run(*arguments: object) -> object:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def write(path: Path, *cells: Record) -> Path:
    path.write_text("".join(record.to_line() for record in cells), encoding="utf-8")
    return path


def test_a_page_has_everything_in_one_file(tmp_path: Path) -> None:
    out = tmp_path / "new" / "report.html"
    result = run(write_all(tmp_path / "results"), "-o", out)
    assert result.exit_code == 0, result.output
    assert sorted(file.name for file in out.parent.iterdir()) == ["report.html"]
    page = out.read_text(encoding="utf-8")
    assert EVIL not in page
    assert page.count("<script>") == 1
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page
    assert page.count('type="range"') == 6


def test_a_folder_with_records_of_every_command_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "outputs"
    folder.mkdir()
    write(folder / "bench.jsonl", cell())
    values = {"seconds": 1.0, "dense_seconds": 1.0, "cost": 1.0, "metrics": {}}
    look = TuneRecord(conditions="{}", about="look", name="dense", item=0, values=values)
    write(folder / "tuned.jsonl", look, look)
    result = run(folder, "-o", tmp_path / "report.html")
    assert result.exit_code == 0, result.output
    assert "tuned.jsonl: 2 measurements of tokenmerge tune, whose result is in its own files" in result.stderr


def test_a_report_of_a_torn_file_says_so(tmp_path: Path) -> None:
    file = write(tmp_path / "results.jsonl", cell())
    file.write_text(file.read_text(encoding="utf-8") + '{"kind"', encoding="utf-8")
    result = run(file, "-o", tmp_path / "report.html")
    assert result.exit_code == 0
    assert "is incomplete" in result.stderr
    assert "is incomplete" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_timed_calls_of_unfinished_cells_are_no_results(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    file = write(folder / "bench.jsonl", cell())
    UnfinishedCells(file).add("a cell of a run that was killed", (1.0, None))
    result = run(folder, "-o", tmp_path / "with.html")
    assert result.exit_code == 0, result.output
    assert "note:" not in result.stderr
    assert run(file, "-o", tmp_path / "without.html").exit_code == 0
    assert (tmp_path / "with.html").read_bytes() == (tmp_path / "without.html").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a.jsonl", "-o", "report.pdf"], "expected a file ending in .html, got report.pdf"),
        (["missing.jsonl"], "cannot read missing.jsonl"),
        ([], "none given"),
        (["a.jsonl", "-o", "report.csv"], "expected a file ending in .html, got report.csv"),
    ],
)
def test_bad_input_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("a.jsonl"), cell())
    error = run(*arguments).exception
    assert isinstance(error, ConfigError)
    assert words in str(error)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("peak_bytes",), "x"),
        (("conditions", "frames"), [[]]),
        (("conditions", "device_name"), 3),
        (("conditions", "threads"), "two"),
        (("conditions", "batch"), float("nan")),
        (("conditions", "steps"), "\ud800"),
        (("facts", "notes"), ["\udfff"]),
        (("conditions", "model"), json.loads("[" * 900 + "]" * 900)),
        (("conditions", "environment"), {}),
    ],
)
def test_a_record_with_a_strange_value_is_one_line(
    tmp_path: Path, place: tuple[str, ...], value: object
) -> None:
    cells = grid_of_cells()[:2]
    strange = json.loads(cells[0].to_line())
    inner = strange
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    file = tmp_path / "results.jsonl"
    file.write_text(json.dumps(strange) + "\n" + cells[1].to_line())
    error = run(file, "--out", tmp_path / "report.html").exception
    assert isinstance(error, ConfigError), repr(error)
    assert "results" in str(error)
    assert len(str(error)) < 1_000
    assert list(tmp_path.iterdir()) == [file]


def test_a_picture_that_is_missing_or_no_picture_costs_its_pairs_alone(tmp_path: Path) -> None:
    folder, out = write_all(tmp_path / "results"), tmp_path / "report.html"
    picture = folder / "dense" / "0.png"
    for spoil in (lambda: picture.write_text("<svg onload='x'>"), picture.unlink):
        spoil()
        result = run(folder, "-o", out)
        assert result.exit_code == 0, result.output
        page = out.read_text(encoding="utf-8")
        assert page.count('type="range"') == 3  # the other prompt's
        for text in (result.stderr, page):
            assert text.count(str(picture)) == 1
        assert "3 pairs of sample images are not shown; the first is tome ratio=0.25, seed 0" in result.stderr


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    file = write(tmp_path / "results.jsonl", cell())
    error = run(file, "-o", tmp_path / "file" / "report.html").exception
    assert isinstance(error, ConfigError)
    assert "--out" in str(error)
