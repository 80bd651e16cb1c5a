"""Figures and samples of evaluations that ran more than once, and of categories."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.reporting.made import cell, grid_of_cells, quality
from tokenmerge.errors import ConfigError
from tokenmerge.reporting.content import content_of
from tokenmerge.reporting.curves import charts
from tokenmerge.reporting.quality import QualityRecord, SampleRecord, metric_names, read_quality
from tokenmerge.reporting.results import Results, read_results

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
    assert list(read_quality(file)) == [TOME, SAMPLE]


@pytest.mark.parametrize("field", ["conditions", "measured_with", "settings"])
def test_a_record_with_something_else_in_it_is_refused(tmp_path: Path, field: str) -> None:
    file = write(tmp_path / "a.jsonl", dataclasses.replace(TOME, **{field: "x"}))
    with pytest.raises(ConfigError, match="line 1: not a record of quality"):
        list(read_quality(file))


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
    assert table.header == ("variant", "category", "pictures", "psnr ↑")
    assert [row.cells for row in table.rows] == [
        ("tome ratio=0.5", "all", "4", "20"),
        ("tome ratio=0.5", "Animals", "3", "20"),
    ]
    assert table.words == 2
    assert "a note" in table.notes


def test_fewer_steps_are_one_line_of_the_curve_and_dense_is_told_once() -> None:
    fewer = [
        dataclasses.replace(
            TOME, model="geometry:sd15", width=512, height=512, variant="fewer-steps", settings={"as": label}
        )
        for label in ("tome ratio=0.5", "tome ratio=0.5 merge_mlp", "tome ratio=0.25")
    ]
    steps = [
        cell("fewer-steps", (dense,), 4.0, settings=record.settings)
        for dense, record in zip((2.0, 1.0, 3.0), fewer, strict=True)
    ]
    dense = dataclasses.replace(fewer[0], variant="dense", settings={}, figures={"psnr": 99.0})
    (chart,) = charts(steps, fewer)
    assert [(line.name, line.labels) for line in chart.lines] == [
        ("fewer-steps (tome merge_mlp)", ("0.5",)),
        ("fewer-steps (tome)", ("0.25", "0.5")),
    ]
    assert chart.level == ("dense", 1.0)
    (chart,) = charts([*steps, cell("dense", (4.0,), 4.0)], [*fewer, dense])
    assert chart.lines[0].name == "dense"
    assert chart.level is None


def test_figures_are_in_the_order_of_the_record_with_most() -> None:
    dense = dataclasses.replace(TOME, figures={"glyphs": 1.0})
    tome = dataclasses.replace(TOME, figures={"psnr": 1.0, "glyphs": 1.0})
    assert metric_names([dense, tome]) == ["psnr", "glyphs"]


def test_the_conditions_of_pictures_are_at_the_foot_once() -> None:
    other = dataclasses.replace(TOME, variant="tomesd")
    ((name, text),) = content_of(Results((), (TOME, other))).conditions
    assert name == "Pictures of m, 64 × 32"
    assert '"steps": 20' in text
    assert content_of(Results((), tuple(quality()))).conditions == ()
