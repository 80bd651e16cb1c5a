from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tools.tests.reporting.made import EVIL, cell, grid_of_cells, quality, write_all

from tokenmerge.errors import ConfigError
from tokenmerge_tools.records.file import Results, read_results
from tokenmerge_tools.records.kinds import CellRecord, QualityRecord, SampleRecord
from tokenmerge_tools.reporting.curves import Chart, Line, charts
from tokenmerge_tools.reporting.page import content_of
from tokenmerge_tools.reporting.plots import draw
from tokenmerge_tools.reporting.tables import Table, measured_tables


def row_of(table: Table, *starts: str) -> dict[str, str]:
    (found,) = [row for row in table.rows if row.cells[: len(starts)] == starts]
    return dict(zip(table.header, found.cells, strict=True))


def test_figures_of_a_cell() -> None:
    facts = {"flops_dense": 200, "flops_merged": 150}
    (table,) = measured_tables([cell("tome", (2.0, 3.0, 2.5), 5.0, facts=facts, peak_bytes=3 * 2**29)])
    assert row_of(table, "tome ratio=0.5") == {
        "variant": "tome ratio=0.5",
        "attention": "SDPA",
        "seconds per call": "2.5",
        "quartiles": "2.25 to 2.75",
        "peak GiB": "1.50",
        "speed-up": "2.00×",
        "same attention": "2.00×",
        "time saved": "50.0 %",
        "FLOPs saved": "25.0 %",
    }


def test_cells_without_figures_say_why() -> None:
    cells = [
        cell("dense", status="oom", message="20 GiB asked"),
        cell("tome", status="unavailable", message="no xformers", attention="xformers"),
        cell("tomesd", status="error", message="RuntimeError: odd"),
    ]
    (table,) = measured_tables(cells)
    assert {row.cells[2] for row in table.rows} == {"OOM", "not available", "failed"}
    assert any("tome ratio=0.5, xFormers attention: no xformers" in note for note in table.notes)


def test_back_ends_of_diffusers_follow_by_name() -> None:
    given = ("sage", "default", "flash", "sdpa", "xformers")
    (table,) = measured_tables(cell("dense", attention=name) for name in given)
    assert [row.cells[1] for row in table.rows] == ["SDPA", "xFormers", "plain", "flash", "sage"]


def test_one_table_for_each_setting_with_dense_first() -> None:
    tables = measured_tables(reversed(grid_of_cells()))
    assert len(tables) == 4
    assert [table.rows[0].cells[:2] for table in tables] == [("dense", "SDPA")] * 4
    assert "512 × 512" in tables[0].title


def test_what_the_memory_counts_is_noted() -> None:
    (table,) = measured_tables([cell("tome", facts={"peak_memory": "peak of tensors"})])
    assert "peak GiB: peak of tensors" in table.notes


@pytest.mark.parametrize(
    "change", [{"steps": 25}, {"scheduler": "plms"}, {"guidance": 3.0}, {"threads": 2}], ids=str
)
def test_other_settings_are_other_tables_and_other_lines(change: dict) -> None:
    both = [
        *grid_of_cells(),
        *(dataclasses.replace(c, conditions={**c.conditions, **change}) for c in grid_of_cells()),
    ]
    content = content_of(Results(tuple(both)))
    assert content.notes == ()
    assert len(content.measured) == 2 * len(measured_tables(grid_of_cells()))
    for table in content.measured:
        assert len({row.cells[:2] for row in table.rows}) == len(table.rows)
    for chart in content.charts:
        for line in chart.lines:
            assert len({x for x, _ in line.points}) == len(line.points)
    names = [table.title for table in content.measured]
    if change.keys() != {"threads"}:  # on a GPU, titles leave the threads out
        assert len(set(names)) == len(names)


def test_of_cells_with_the_same_name_the_newest_is_shown() -> None:
    early, late = "2026-01-01T00:00:00+00:00", "2026-02-01T00:00:00+00:00"
    old = [cell("dense", (9.0,), finished=early), cell("tome", (8.0,), finished=early)]
    new = [
        cell("dense", (5.0,), finished=late, commit="new"),
        cell("tome", (4.0,), finished=late, commit="new", seed=1),
    ]
    for cells in ((*old, *new), (*new, *old)):
        content = content_of(Results(cells))
        (table,) = content.measured
        assert [row.cells[2] for row in table.rows] == ["5", "4"]
        assert content.notes == ("2 older cells are left out; newer ones differ only in commit, seed",)


def test_charts_show_speedup_against_closeness() -> None:
    found = {(chart.title.split(":")[0], chart.x): chart for chart in charts(grid_of_cells(), quality())}
    price = found["Speed-up against closeness", "PSNR, higher is better"]
    lines = {line.name: line for line in price.lines}
    assert lines["tome"].points[-1] == (22.5, pytest.approx(1.375))
    assert lines["tome"].labels == ("0.25", "0.5", "0.75")
    assert ("Speed-up against closeness", "FID, lower is better") in found


def test_cells_with_other_attention_are_in_no_chart() -> None:
    other = [
        dataclasses.replace(c, conditions={**c.conditions, "attention": "default"}) for c in grid_of_cells()
    ]
    assert charts(other, quality()) == []


def test_a_chart_is_the_same_bytes_each_time_and_takes_any_text() -> None:
    line = Line(f"a $x^$ {EVIL}", ((30.0, 1.5), (25.0, 2.0)), ("0.25", EVIL))
    chart = Chart(f"a $x^$ {EVIL}", "PSNR", "speed-up", (line,))
    assert draw(chart) == draw(chart)
    assert "<script>" not in draw(chart)


def test_conditions_are_given_once_for_each_machine() -> None:
    cells = (*grid_of_cells(), cell(device_name="Other GPU"))
    names = [name for name, _ in content_of(Results(cells)).conditions]
    assert len(names) == 2
    assert "abc1234" in content_of(Results(cells)).conditions[0][1]


def test_a_folder_gives_all_its_records(tmp_path: Path) -> None:
    results = read_results([write_all(tmp_path / "results")])
    assert list(results.cells) == grid_of_cells()
    assert list(results.quality) == quality()
    assert all(sample.dense.is_file() and sample.image.is_file() for sample in results.samples)
    assert len(results.samples) == 6


def test_of_equal_cells_the_last_counts(tmp_path: Path) -> None:
    old, new = cell(seconds=(9.0,)), cell(seconds=(1.0,))
    for name, record in (("a.jsonl", old), ("b.jsonl", new)):
        (tmp_path / name).write_text(record.to_line(), encoding="utf-8")
    assert read_results([tmp_path]).cells == (new,)


def test_a_torn_last_line_is_reported_and_left_out(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text(cell().to_line() + cell("dense").to_line()[:50], encoding="utf-8")
    before = file.read_bytes()
    results = read_results([file])
    assert results.cells == (cell(),)
    assert "is incomplete" in results.notes[0]
    assert file.read_bytes() == before


SAMPLE = SampleRecord(prompt="p", seed=0, variant="tome", settings={}, dense="a.png", image="b.png")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"kind": "odd"}\n', "expected one of bench, quality, sample, tune, got 'odd'"),
        ('{"kind": "sample"}\n', "prompt, seed.* missing"),
        (SAMPLE.to_line().replace("a.png", "../a.png"), "inside the results folder"),
        (SAMPLE.to_line().replace("a.png", "/etc/passwd"), "inside the results folder"),
        (quality()[0].to_line().replace("33.25", '"high"'), "numbers in figures"),
        (cell().to_line().replace('"ok"', '"fine"'), "status"),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text(cell("dense").to_line() + line, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"line 2: .*{words}"):
        read_results([file])


def test_nothing_to_report_is_an_error(tmp_path: Path) -> None:
    for paths in ([], [tmp_path], [tmp_path / "missing.jsonl"]):
        with pytest.raises(ConfigError, match="results:"):
            read_results(paths)


def test_records_of_an_evaluation_are_read_back(tmp_path: Path) -> None:
    file = tmp_path / "evaluate.jsonl"
    file.write_text(SAMPLE.to_line() + quality()[0].to_line(), encoding="utf-8")
    results = read_results([file])
    assert results.samples[0].record == SAMPLE
    assert results.samples[0].dense == tmp_path / "a.png"
    assert results.quality == (quality()[0],)
    with pytest.raises(ValueError, match="JSON"):
        QualityRecord(**{**vars(quality()[0]), "figures": {"psnr": float("inf")}}).to_line()


def test_a_cell_knows_its_kind() -> None:
    assert isinstance(CellRecord.from_dict({"status": "ok", **vars(cell())}), CellRecord)
