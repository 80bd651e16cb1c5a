"""Tables of speed-up and closeness with the points of the charts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tokenmerge_tools.records.kinds import LOWER_IS_CLOSER
from tokenmerge_tools.reporting.curves import AGAINST_CLOSENESS, Chart
from tokenmerge_tools.reporting.tables import FASTER, Table, TableRow, times

# Mean PSNR in dB. From 40 on, images are hard to tell apart; at 30, details differ.
_CLOSENESS = (40.0, 35.0, 30.0)

_Point = tuple[str, str]  # the method and the label of the point
_Figures = dict[str, float]  # the value of each metric


def price_tables(charts: Iterable[Chart]) -> list[Table]:
    """Make one table for each set of images, with a row for each point of its charts.

    Rows that are faster than dense, and that no other row beats in both speed and closeness, are marked.
    """
    return [_table(title, charts) for title, charts in _by_set_of_images(charts).items()]


def fastest_table(charts: Iterable[Chart]) -> Table | None:
    """Make a table of the fastest variant at each PSNR, for each set of images.

    The result is None if no image has a PSNR.
    """
    known = {}
    for title, members in _by_set_of_images(charts).items():
        speeds, figures = _points(members)
        points = [(speeds[point], one["psnr"], point) for point, one in figures.items() if "psnr" in one]
        if points:
            known[title] = points
    if not known:
        return None
    shared, names = _shared_parts(list(known))
    rows = []
    for name, points in zip(names, known.values(), strict=True):
        fastest = [_fastest(points, closeness) for closeness in _CLOSENESS]
        rows.append(TableRow((name, *fastest)))
    header = ("images", *(f"PSNR ≥ {closeness:g} dB" for closeness in _CLOSENESS))
    notes = (
        "each cell: the fastest variant with at least this mean PSNR to the dense images, its speed-up and "
        "its PSNR; fewer-steps is the dense model with this number of steps",
        *([f"all images: {', '.join(shared)}"] if shared else []),
    )
    return Table("Fastest variant by closeness", header, tuple(rows), notes, words=len(header))


def _by_set_of_images(charts: Iterable[Chart]) -> dict[str, list[Chart]]:
    found: dict[str, list[Chart]] = {}
    for chart in charts:
        found.setdefault(chart.title.removeprefix(AGAINST_CLOSENESS), []).append(chart)
    return dict(sorted(found.items(), key=lambda item: _natural(item[0])))


def _shared_parts(titles: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the parts that all titles share, and each title without them.

    >>> _shared_parts(["a, 4 steps, fp32", "b, 4 steps, fp32"])
    (['4 steps', 'fp32'], ['a', 'b'])
    """
    parts = [title.split(", ") for title in titles]
    shared = [part for part in parts[0] if len(parts) > 1 and all(part in other for other in parts)]
    return shared, [
        ", ".join(part for part in parts_of_title if part not in shared) for parts_of_title in parts
    ]


def _natural(text: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts texts by the values of the numbers in them.

    >>> sorted(["20 steps", "4 steps"], key=_natural)
    ['4 steps', '20 steps']
    """
    parts = re.split(r"(\d+)", text)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def _points(charts: Sequence[Chart]) -> tuple[dict[_Point, float], dict[_Point, _Figures]]:
    """Return the speed-up and closeness of each point. The charts of all metrics have the same points."""
    speeds: dict[_Point, float] = {}
    figures: dict[_Point, _Figures] = {}
    for chart in charts:
        for line in chart.lines:
            for (x, y), label in zip(line.points, line.labels, strict=True):
                speeds[line.name, label] = y
                figures.setdefault((line.name, label), {})[chart.metric] = x
    return speeds, figures


def _table(title: str, charts: Sequence[Chart]) -> Table:
    speeds, figures = _points(charts)
    metrics = [chart.metric for chart in charts]
    first = metrics[0]
    sign = -1.0 if first in LOWER_IS_CLOSER else 1.0
    known = {
        point: (speeds[point], sign * found[first]) for point, found in figures.items() if first in found
    }
    rows = []
    for point in sorted(figures, key=lambda point: -speeds[point]):
        of_metrics = [_figure(figures[point].get(metric)) for metric in metrics]
        best = point in known and speeds[point] > FASTER
        if best and any(_beats(known[point], other) for other in known.values()):
            best = False
        rows.append(TableRow((*point, times(speeds[point]), *of_metrics), best=best))
    arrows = tuple(f"{metric} {'↓' if metric in LOWER_IS_CLOSER else '↑'}" for metric in metrics)
    notes = (f"marked rows: faster than dense, and no other row is both faster and closer in {first}",)
    return Table(title, ("method", "setting", "speed-up", *arrows), tuple(rows), notes, words=1)


def _beats(point: tuple[float, float], other: tuple[float, float]) -> bool:
    return other[0] >= point[0] and other[1] >= point[1] and other != point


def _fastest(known: Sequence[tuple[float, float, _Point]], closeness: float) -> str:
    close = [one for one in known if one[1] >= closeness and one[0] > 1]
    if not close:
        return "none faster than dense"
    speed, psnr, point = max(close)
    return f"{' '.join(point).strip()}: {times(speed)} ({psnr:.1f})"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
