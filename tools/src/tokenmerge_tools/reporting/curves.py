"""The data of the plots, independent of a plotting library."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from tokenmerge_tools.records.kinds import (
    LOWER_IS_CLOSER,
    CellRecord,
    QualityRecord,
    cell_of_pictures,
    metric_names,
    variant_label,
)
from tokenmerge_tools.reporting.tables import grouped, quality_name, where_drawn
from tokenmerge_tools.variants.variant import DENSE

AGAINST_CLOSENESS = "Speed-up against closeness: "  # the beginning of the title of such a chart
_SPEEDUP = "speed-up, t_dense / t"
_FUSED = "sdpa"
_KNOBS = ("ratio", "interval", "threshold", "as", "steps")  # the settings that make a variant faster


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a chart. Points (x, y) are joined in their order; labels stand at the points."""

    name: str
    points: tuple[tuple[float, float], ...]
    labels: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart of a ``metric`` on the x axis. ``level`` is the (name, y) of a line to compare with."""

    title: str
    x: str
    y: str
    lines: tuple[Line, ...]
    level: tuple[str, float] | None = None
    metric: str = "psnr"


def charts(cells: Iterable[CellRecord], quality: Sequence[QualityRecord]) -> list[Chart]:
    """Make charts of speed-up against closeness.

    They only use cells with fused attention, so that its gain is not credited to merging.
    """
    timed = _timed(cells)
    found = []
    for records in _sets_of_images(quality):
        metrics = metric_names(records)
        first = metrics[0]
        for metric in metrics:
            lines = tuple(_lines_of_methods(records, metric, timed))
            closeness = [x for x, _ in _points_of(lines)]
            varies = len(closeness) == 1 or len(set(closeness)) > 1
            if lines and (metric == first or varies):
                with_dense = any(line.name == DENSE for line in lines)
                closer = "lower" if metric in LOWER_IS_CLOSER else "higher"
                title = f"{AGAINST_CLOSENESS}{quality_name(records[0])}"
                level = None if with_dense else ("dense", 1.0)
                found.append(
                    Chart(title, f"{metric.upper()}, {closer} is better", _SPEEDUP, lines, level, metric)
                )
    return found


def _points_of(lines: Iterable[Line]) -> Iterator[tuple[float, float]]:
    for line in lines:
        yield from line.points


def _lines_of_methods(
    records: Sequence[QualityRecord], metric: str, cells: Sequence[CellRecord]
) -> Iterable[Line]:
    """Make one line for each method, with a point for each ratio, and one line for fewer steps.

    The speed-up is from the benchmark if it has the variant, otherwise from the evaluation. A number of fewer
    steps may be timed beside several methods. Its point is then the median.
    """
    families: dict[str, dict[float, list[tuple[float, float]]]] = {}
    for record in records:
        speedup = _speedup(record, cells)
        if speedup is not None and metric in record.figures:
            knobs = (record.settings[name] for name in _KNOBS if name in record.settings)
            knob = float(record.steps_used if record.steps_used is not None else next(knobs, math.nan))
            family = families.setdefault(_family(record.variant, record.settings), {})
            family.setdefault(knob, []).append((record.figures[metric], speedup))
    for name, found in sorted(families.items()):
        # Join points in the order of ratio or steps, since metrics of few images may not be monotonic.
        ordered = sorted(found)
        points = tuple((median(x for x, _ in found[k]), median(y for _, y in found[k])) for k in ordered)
        yield Line(name, points, tuple("" if math.isnan(knob) else f"{knob:g}" for knob in ordered))


def _speedup(record: QualityRecord, cells: Sequence[CellRecord]) -> float | None:
    """Return the speed-up of a variant at the number of steps of its images, or None if it is unknown."""
    cell = cell_of_pictures(record.label, record.drawn_with, cells)
    if cell is None or cell.speedup is None:
        return record.speedup
    used = cell.facts.get("steps_used")
    # With as many steps as dense, fewer-steps is the dense run.
    return cell.speedup if record.steps_used == used and used != cell.conditions["steps"] else None


def notes_on_charts(cells: Iterable[CellRecord], quality: Sequence[QualityRecord]) -> list[str]:
    """Note which variants are in no chart, as they were not timed."""
    timed = _timed(cells)
    notes = []
    for records in _sets_of_images(quality):
        untimed = [one.label for one in records if one.variant != DENSE and _speedup(one, timed) is None]
        if untimed:
            notes.append(
                f"no chart of speed-up against closeness of {quality_name(records[0])} has "
                f"{', '.join(untimed)}: their time is unknown; run tokenmerge evaluate with a new results "
                "file to draw and time them"
            )
    return notes


def _sets_of_images(quality: Iterable[QualityRecord]) -> list[list[QualityRecord]]:
    return grouped([record for record in quality if record.category is None], where_drawn)


def _timed(cells: Iterable[CellRecord]) -> list[CellRecord]:
    return [c for c in cells if c.median is not None and c.conditions["attention"] == _FUSED]


def _family(variant: str, settings: Mapping[str, Any]) -> str:
    """Name a variant without the settings that make it faster, so that one name stands for one line.

    >>> _family("tome", {"ratio": 0.5, "merge_mlp": True})
    'tome merge_mlp'
    """
    return variant_label(variant, {name: value for name, value in settings.items() if name not in _KNOBS})
