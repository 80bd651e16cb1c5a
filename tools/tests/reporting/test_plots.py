"""Charts: their labels and legends can be read, and none is without information."""

from __future__ import annotations

import dataclasses
import itertools
import random
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from tools.tests.reporting.made import grid_of_cells, quality

from tokenmerge_tools.records.file import read_results
from tokenmerge_tools.reporting import page as report
from tokenmerge_tools.reporting.curves import Chart, Line, charts
from tokenmerge_tools.reporting.page import as_html, content_of
from tokenmerge_tools.reporting.plots import draw, figure_of

ROOT = Path(__file__).parents[3]


def crowded(lines: int, points: int) -> Chart:
    """A chart whose points are close together, with long names."""
    numbers = random.Random(0)
    made = tuple(
        Line(
            f"method {line} scope=block planner=tiled proportional merge_sharing.blocks"[: 10 + 12 * line],
            tuple((numbers.gauss(40, 1), numbers.gauss(2, 0.1)) for _ in range(points)),
            tuple(f"{index / 8:g}" for index in range(points)),
        )
        for line in range(lines)
    )
    return Chart(
        "Speed-up against closeness: " + "a long title, " * 12, "PSNR", "speed-up", made, ("dense", 1.0)
    )


@pytest.mark.parametrize(("lines", "points"), [(1, 1), (3, 5), (14, 6), (5, 20)])
def test_no_label_covers_another_or_a_point_or_leaves_the_picture(lines: int, points: int) -> None:
    chart = crowded(lines, points)
    figure = figure_of(chart)
    renderer = FigureCanvasAgg(figure).get_renderer()
    axes = figure.axes[0]
    boxes = [text.get_window_extent(renderer) for text in axes.texts]
    assert not [pair for pair in itertools.combinations(boxes, 2) if pair[0].overlaps(pair[1])]
    places = [axes.transData.transform(point) for line in chart.lines for point in line.points]
    assert not [box for box in boxes for x, y in places if box.x0 < x < box.x1 and box.y0 < y < box.y1]
    assert len(boxes) == 1 if (lines, points) == (1, 1) else len(boxes) > 10
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes)


@pytest.mark.parametrize("lines", [1, 4, 25])
def test_the_legend_is_inside_the_picture_and_beside_the_axes(lines: int) -> None:
    figure = figure_of(crowded(lines, 3))
    renderer = FigureCanvasAgg(figure).get_renderer()
    legend = figure.legends[0].get_window_extent(renderer)
    axes = figure.axes[0].get_tightbbox(renderer)
    assert legend.x0 >= 0
    assert legend.x1 <= figure.bbox.x1
    assert legend.y0 >= 0
    assert not legend.overlaps(axes)
    assert figure.axes[0].get_window_extent(renderer).height / figure.dpi > 2.5  # inches


def test_text_stays_text_so_that_a_picture_can_be_searched() -> None:
    svg = draw(crowded(3, 5))
    assert ">0.125<" in svg
    assert "method 0" in svg


def test_the_page_of_the_records_in_this_repository_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only every sixth chart is drawn. It stands for the five after it."""
    drawn: list[str] = []
    numbers = itertools.count()

    def some(chart: Chart) -> str:
        if next(numbers) % 6 == 0:
            drawn.append(draw(chart))
        return drawn[-1]

    monkeypatch.setattr(report, "draw", some)
    page = as_html(content_of(read_results([ROOT / "benchmarks" / "results"])))
    assert len(drawn) > 5
    assert len(page.encode()) < 3e6


def test_a_measure_that_does_not_vary_has_no_chart() -> None:
    records = [dataclasses.replace(record, figures={**record.figures, "glyphs": 1.0}) for record in quality()]
    drawn = [chart.metric for chart in charts(grid_of_cells(), records)]
    assert drawn == ["psnr", "fid"]
    other = [dataclasses.replace(records[0], figures={**records[0].figures, "glyphs": 0.5}), *records[1:]]
    assert "glyphs" in [chart.metric for chart in charts(grid_of_cells(), other)]
