"""The tables of speed and closeness."""

from __future__ import annotations

import dataclasses

from tools.tests.reporting.made import cell, grid_of_cells, quality

from tokenmerge_tools.records.file import Results
from tokenmerge_tools.reporting.curves import charts
from tokenmerge_tools.reporting.page import as_html, content_of
from tokenmerge_tools.reporting.price_tables import fastest_table, price_tables
from tokenmerge_tools.reporting.tables import measured_tables, quality_tables

CELLS = grid_of_cells()


def test_the_best_rows_are_those_that_no_other_row_beats_in_both() -> None:
    (table,) = price_tables(charts(CELLS, quality()))
    assert table.header == ("method", "setting", "speed-up", "psnr ↑", "fid ↓")
    values = {row: (float(row.cells[2].removesuffix("×")), float(row.cells[3])) for row in table.rows}
    for row, (speed, close) in values.items():
        beaten = any(s > speed and c > close for s, c in values.values())
        assert row.best is not beaten
    assert {row.cells[0] for row in table.rows if row.best} == {"tome"}  # tomesd is slower and 1 dB worse


def test_a_metric_that_is_lower_for_closer_pictures_decides_the_other_way() -> None:
    records = [dataclasses.replace(r, figures={"lpips": r.figures["fid"] / 100}) for r in quality()]
    (table,) = price_tables(charts(CELLS, records))
    assert {row.cells[0] for row in table.rows if row.best} == {"tome"}


def test_the_fastest_at_a_closeness() -> None:
    """tome has 27.5, 25 and 22.5 dB at 1.125, 1.25 and 1.375 times the speed; 15 dB are added."""
    records = [dataclasses.replace(r, figures={"psnr": r.figures["psnr"] + 15}) for r in quality()]
    table = fastest_table(charts(CELLS, records))
    assert table.header[1:] == ("PSNR ≥ 40 dB", "PSNR ≥ 35 dB", "PSNR ≥ 30 dB")
    (row,) = table.rows
    assert row.cells[1:] == ("tome 0.5: 1.25× (40.0)", "tome 0.75: 1.38× (37.5)", "tome 0.75: 1.38× (37.5)")
    table = fastest_table(charts(CELLS, quality()))
    assert table.rows[0].cells[1:] == ("none faster than dense",) * 3
    assert fastest_table([]) is None


def test_a_note_says_once_what_all_sets_of_pictures_share() -> None:
    others = [
        dataclasses.replace(record, conditions={**record.conditions, "steps": 8}) for record in quality()
    ]
    cells = [*CELLS, *(cell("tome", (2.0,), 4.0, ratio=r, steps=8) for r in (0.25, 0.5, 0.75))]
    table = fastest_table(charts(cells, [*quality(), *others]))
    assert [row.cells[0] for row in table.rows] == ["8 steps", "50 steps"]
    assert any(note.startswith("all images: geometry:sd15, 512 × 512, fp16 on cuda") for note in table.notes)


def test_where_nothing_is_faster_no_row_is_best() -> None:
    slow = [cell("tome", (4.42,), 4.4, ratio=ratio) for ratio in (0.25, 0.5)]
    slow += [cell("tomesd", (4.39,), 4.4, ratio=ratio) for ratio in (0.25, 0.5)]
    (table,) = measured_tables(slow)
    assert not any(row.best for row in table.rows)
    assert "no variant is faster than dense" in table.notes
    assert not any(row.best for one in price_tables(charts(slow, quality())) for row in one.rows)


def test_the_fastest_row_of_a_table_is_marked() -> None:
    tables = measured_tables(CELLS)
    assert [[row.cells[0] for row in table.rows if row.best] for table in tables[:2]] == [
        ["tome ratio=0.5 merge_mlp"]
    ] * 2


def test_pictures_that_all_equal_dense_are_identical() -> None:
    same = dataclasses.replace(quality()[0], figures={"ssim": 1.0})
    other = dataclasses.replace(quality()[1], figures={"psnr": 30.0, "ssim": 0.9})
    dense = dataclasses.replace(same, variant="dense", settings={}, figures={"glyphs": 1.0})
    (table,) = quality_tables([dense, same, other])
    column = table.header.index("psnr ↑")
    assert [row.cells[column] for row in table.rows] == ["", "identical", "30"]
    assert "glyphs: share of the images that show the emoji that the prompt names" in table.notes


def test_notes_are_said_once() -> None:
    slow = {"flops_dense": 2, "flops_merged": 1, "notes": ["3 blocks stay dense"]}
    cells = [cell("tome", ratio=ratio, facts=slow) for ratio in (0.25, 0.5)]
    (table,) = measured_tables(cells)
    assert "3 blocks stay dense (tome ratio=0.25, tome ratio=0.5)" in table.notes
    sizes = [cell("tome", ratio=0.5, facts=slow, width=side, peak_bytes=None) for side in (512, 768)]
    text = as_html(content_of(Results(tuple(sizes))))
    assert text.count("3 blocks stay dense") == 1
