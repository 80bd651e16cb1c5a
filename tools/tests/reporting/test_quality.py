"""Figures and samples of evaluations that ran more than once, and of categories."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from tools.tests.reporting.made import cell, drawn, grid_of_cells, quality

from tokenmerge.errors import ConfigError
from tokenmerge_tools.records.file import Results, read_records, read_results
from tokenmerge_tools.records.kinds import (
    CellRecord,
    QualityRecord,
    SampleRecord,
    cell_of_pictures,
    metric_names,
)
from tokenmerge_tools.reporting.curves import AGAINST_CLOSENESS, charts
from tokenmerge_tools.reporting.page import content_of

TOME = QualityRecord(
    model="m",
    width=64,
    height=32,
    variant="tome",
    settings={"ratio": 0.5},
    figures={"psnr": 20.0},
    images=4,
    conditions={"steps": 20},
    measured_with={"kid": "n"},
    notes=("a note",),
)
SAMPLE = SampleRecord(
    prompt="p", seed=0, variant="tome", settings={"ratio": 0.5}, dense="d.png", image="i.png"
)


def write(path: Path, *records: QualityRecord | SampleRecord) -> Path:
    path.write_text("".join(record.to_line() for record in records), encoding="utf-8")
    return path


def test_records_are_read_back_and_other_lines_passed_over(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", TOME, SAMPLE)
    file.write_text('{"kind": "bench"}\n' + file.read_text())
    assert list(read_records(file, QualityRecord, SampleRecord)) == [TOME, SAMPLE]


@pytest.mark.parametrize("field", ["conditions", "measured_with", "settings"])
def test_a_record_with_something_else_in_it_is_refused(tmp_path: Path, field: str) -> None:
    file = write(tmp_path / "a.jsonl", dataclasses.replace(TOME, **{field: "x"}))
    with pytest.raises(ConfigError, match="line 1: not a quality record"):
        list(read_records(file, QualityRecord, SampleRecord))


def test_of_the_same_pictures_the_last_figures_count(tmp_path: Path) -> None:
    later = dataclasses.replace(TOME, figures={"psnr": 21.0}, measured_with={}, notes=())
    others = [
        dataclasses.replace(TOME, **change)
        for change in ({"conditions": {"steps": 10}}, {"category": "Animals"}, {"settings": {"ratio": 0.25}})
    ]
    results = read_results([write(tmp_path / "a.jsonl", TOME, SAMPLE, *others, later, SAMPLE)])
    assert results.quality == (*others, later)
    assert [sample.record for sample in results.samples] == [SAMPLE]


def test_a_sample_of_another_folder_is_another_sample(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    files = [write(folder / "a.jsonl", SAMPLE) for folder in (tmp_path, tmp_path / "b")]
    assert len(read_results(files).samples) == 2


def test_categories_are_lines_of_the_table_and_no_points_of_the_curve() -> None:
    of_a_category = [
        dataclasses.replace(record, category="Animals", figures={"psnr": 1.0}) for record in quality()
    ]
    assert charts(grid_of_cells(), [*quality(), *of_a_category]) == charts(grid_of_cells(), quality())
    (table,) = content_of(
        Results((), (TOME, dataclasses.replace(TOME, category="Animals", images=3)))
    ).quality
    assert table.header == ("variant", "category", "images", "psnr ↑")
    assert [row.cells for row in table.rows] == [
        ("tome ratio=0.5", "all", "4", "20"),
        ("tome ratio=0.5", "Animals", "3", "20"),
    ]
    assert table.words == 2
    assert "a note" in table.notes


def test_fewer_steps_are_one_line_of_the_curve_and_dense_is_told_once() -> None:
    labels = ("tome ratio=0.5", "tome ratio=0.5 merge_mlp", "tome ratio=0.25", "tome ratio=0.1")
    steps_used = (10, 5, 15, 50)  # the last is the number of steps of dense
    fewer = [_fewer_steps(label, steps) for label, steps in zip(labels, steps_used, strict=True)]
    steps = [_timed(record, used / 5) for record, used in zip(fewer, steps_used, strict=True)]
    dense = dataclasses.replace(
        fewer[0], variant="dense", settings={}, steps_used=None, figures={"psnr": 99.0}
    )
    (chart,) = charts(steps, fewer)
    assert [(line.name, line.labels) for line in chart.lines] == [
        ("fewer-steps", ("5", "10", "15")),
    ]
    assert chart.level == ("dense", 1.0)
    (chart,) = charts([*steps, cell("dense", (4.0,), 4.0)], [*fewer, dense])
    assert chart.lines[0].name == "dense"
    assert chart.level is None


def test_a_number_of_steps_that_fits_into_several_methods_is_one_point_at_their_median() -> None:
    fewer = [_fewer_steps(f"tome ratio={ratio}", 10) for ratio in (0.1, 0.2, 0.3)]
    timed = [_timed(record, took) for record, took in zip(fewer, (2.0, 1.0, 1.6), strict=True)]
    ((line,),) = (chart.lines for chart in charts(timed, fewer))
    assert (line.points, line.labels) == (((20.0, 2.5),), ("10",))


def test_what_was_drawn_and_timed_with_different_steps_is_in_no_chart_and_the_report_says_so() -> None:
    drawn = _fewer_steps("tome ratio=0.5", 12)
    cells = [_timed(dataclasses.replace(drawn, steps_used=13), 2.0)]
    assert not charts(cells, [drawn])
    for one in (drawn, dataclasses.replace(drawn, steps_used=None)):
        (note,) = content_of(Results(tuple(cells), (one,))).notes
        assert note.startswith("no chart of speed-up against closeness of ")
        assert "has fewer-steps (tome ratio=0.5): their time is unknown; run tokenmerge evaluate" in note
    same = dataclasses.replace(drawn, steps_used=13)
    assert charts(cells, [same])
    assert not content_of(Results(tuple(cells), (same,))).notes
    assert same.key != drawn.key


def _fewer_steps(fits_into: str, steps: int) -> QualityRecord:
    return dataclasses.replace(
        quality()[0],
        figures={"psnr": 20.0},
        variant="fewer-steps",
        settings={"as": fits_into},
        steps_used=steps,
    )


def _timed(record: QualityRecord, seconds: float) -> CellRecord:
    """A cell of fewer steps beside dense, which takes 4 seconds."""
    facts = {"steps_used": record.steps_used}
    return cell("fewer-steps", (seconds,), 4.0, settings=record.settings, facts=facts)


def test_variants_with_a_number_of_their_own_are_lines_too() -> None:
    cells = [cell("deepcache", (1.0 / n,), 4.0, settings={"interval": float(n)}) for n in (5, 2)]
    records = [
        dataclasses.replace(quality()[0], variant="deepcache", settings={"interval": float(n)})
        for n in (5, 2)
    ]
    (chart, *_) = charts(cells, records)
    assert [(line.name, line.labels) for line in chart.lines] == [("deepcache", ("2", "5"))]


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 25},
        {"scheduler": "plms"},
        {"guidance": 3.0},
        {"dtype": "fp32"},
        {"device": "cpu"},
        {"prompts": {"count": 100, "key": "fedcba9876543210"}},
        {"seeds": [0, 1]},
    ],
    ids=str,
)
def test_pictures_drawn_otherwise_are_another_table_and_another_chart(change: dict) -> None:
    others = [dataclasses.replace(record, conditions=drawn(**change)) for record in quality()]
    content = content_of(Results((), (*quality(), *others)))
    assert [len(table.rows) for table in content.quality] == [len(quality())] * 2
    of_a_cell = {name: value for name, value in change.items() if name not in ("prompts", "seeds")}
    cells = [dataclasses.replace(c, conditions={**c.conditions, **of_a_cell}) for c in grid_of_cells()]
    price = [
        c
        for c in charts([*grid_of_cells(), *cells], [*quality(), *others])
        if c.title.startswith(AGAINST_CLOSENESS)
    ]
    assert [len(chart.lines) for chart in price] == [2] * 4
    assert all(len(line.points) == 3 for chart in price for line in chart.lines)


@pytest.mark.parametrize("finished", ["", "2026-11-23T00:00:00+00:00"])
def test_figures_of_an_older_commit_are_left_out_with_a_note(finished: str) -> None:
    """Of records with a date, the latest counts, in any order of files. Of the others, the last counts."""
    new = [
        dataclasses.replace(record, conditions=drawn(commit="new"), figures={"psnr": 1.0}, finished=finished)
        for record in quality()
    ]
    both = (*new, *quality()) if finished else (*quality(), *new)
    content = content_of(Results((), both))
    (table,) = content.quality
    assert {row.cells[2] for row in table.rows} == {"1"}
    assert content.notes[:-1] == ("6 older quality records are left out; newer ones differ only in commit",)


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "fp32"},
        {"device": "cpu"},
        {"scheduler": "plms"},
        {"guidance": 3.0},
        {"steps": 25},
        {"compile": True},
        {"height": 768},
    ],
    ids=str,
)
def test_the_speed_up_is_that_of_a_cell_with_the_conditions_of_the_pictures(other: dict) -> None:
    assert cell_of_pictures("tome ratio=0.5", quality()[1].drawn_with, [cell(**other)]) is None
    assert [c for c in charts([cell(**other)], quality()) if c.title.startswith(AGAINST_CLOSENESS)] == []


def test_of_several_such_cells_the_newest_of_the_whole_pipeline_counts() -> None:
    late = "2026-02-01T00:00:00+00:00"
    wanted = cell(commit="new", finished=late)
    others = [
        cell(),
        cell(scope="denoiser", finished=late),
        cell(batch=2, finished=late),
        cell("tomesd", finished=late),
    ]
    conditions = quality()[1].drawn_with
    for cells in ([wanted, *others], [*others, wanted]):
        assert cell_of_pictures("tome ratio=0.5", conditions, cells) == wanted
    alone = cell(scope="denoiser", scheduler="plms", device="cuda:1")
    assert cell_of_pictures("tome ratio=0.5", conditions, [alone]) == alone


def test_figures_are_in_the_order_of_the_record_with_most() -> None:
    dense = dataclasses.replace(TOME, figures={"glyphs": 1.0})
    tome = dataclasses.replace(TOME, figures={"psnr": 1.0, "glyphs": 1.0})
    assert metric_names([dense, tome]) == ["psnr", "glyphs"]


def test_the_conditions_of_pictures_are_at_the_foot_once() -> None:
    other = dataclasses.replace(TOME, variant="tomesd")
    ((name, text),) = content_of(Results((), (TOME, other))).conditions
    assert name == "Images of m, 64 × 32"
    assert '"steps": 20' in text
    without = dataclasses.replace(TOME, conditions={})
    assert content_of(Results((), (without,))).conditions == ()


TIMED = dataclasses.replace(TOME, speedup=1.5, speedup_quartiles=(1.4, 1.6))


def test_pictures_that_were_timed_while_drawn_have_their_speed_in_table_and_curve() -> None:
    other = dataclasses.replace(TIMED, settings={"ratio": 0.75}, speedup=2.0, figures={"psnr": 15.0})
    once = dataclasses.replace(TIMED, speedup_quartiles=(1.499, 1.501))
    (table,) = content_of(Results((), (once,))).quality
    assert table.rows[0].cells[-2] == "1.50×"  # one timed image has no quartiles
    fewer = dataclasses.replace(TIMED, variant="fewer-steps", settings={"steps": 12}, steps_used=12)
    content = content_of(Results((), (TIMED, other, fewer)))
    (table,) = content.quality
    assert table.header[-2:] == ("by the clock", "psnr ↑")
    assert [row.cells[-2] for row in table.rows] == [
        "1.50× (1.40 to 1.60)",
        "2.00× (1.40 to 1.60)",
        "1.50× (1.40 to 1.60)",
    ]
    ((steps, merged),) = (chart.lines for chart in content.charts)
    assert (merged.name, merged.points, merged.labels) == (
        "tome",
        ((20.0, 1.5), (15.0, 2.0)),
        ("0.5", "0.75"),
    )
    assert (steps.name, steps.points, steps.labels) == ("fewer-steps", ((20.0, 1.5),), ("12",))
    assert not [note for note in content.notes if "chart of speed-up against closeness" in note]


def test_the_speed_of_a_benchmark_comes_before_that_of_the_pictures() -> None:
    benchmark = cell("tome", (1.0,), 4.0, ratio=0.5, model="m", width=64, height=32, steps=20)
    (chart,) = charts([benchmark], [TIMED])
    assert chart.lines[-1].points == ((20.0, 4.0),)


def test_a_note_says_which_variants_no_chart_has_and_what_to_do() -> None:
    content = content_of(Results((), (TOME, dataclasses.replace(TOME, settings={"ratio": 0.1}))))
    (note,) = [note for note in content.notes if "chart of speed-up against closeness" in note]
    assert "has tome ratio=0.5, tome ratio=0.1: their time is unknown" in note
    assert "run tokenmerge evaluate with a new results file" in note


def test_records_without_times_are_read(tmp_path: Path) -> None:
    values = json.loads(TIMED.to_line())
    assert QualityRecord.from_dict(values) == TIMED
    del values["speedup"], values["speedup_quartiles"]
    assert QualityRecord.from_dict(values) == TOME
