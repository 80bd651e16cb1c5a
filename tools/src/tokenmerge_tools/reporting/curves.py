"""The data of the plots, independent of a plotting library."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
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
from tokenmerge_tools.reporting.quality_tables import quality_name, where_drawn
from tokenmerge_tools.reporting.tables import SETTING, grouped, setting_name, where_of
from tokenmerge_tools.variants.variant import DENSE, FEWER_STEPS

AGAINST_CLOSENESS = "Speed-up against closeness: "  # begins the title of such a chart
_FUSED = "sdpa"
_KNOBS = ("ratio", "interval", "threshold", "as", "steps")  # settings by which a variant becomes faster


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a chart.

    Points (x, y) are joined in their order. Labels stand at the points.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    labels: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart.

    ``level`` is the (name, y) of a horizontal line to compare with. ``metric`` is the closeness metric on the
    x axis; None: x is something else.
    """

    title: str
    x: str
    y: str
    lines: tuple[Line, ...]
    level: tuple[str, float] | None = None
    from_zero: bool = False
    metric: str | None = None


def charts(cells: Iterable[CellRecord], quality: Sequence[QualityRecord]) -> list[Chart]:
    """Make charts of speed-up against resolution, time against ratio, and speed-up against closeness.

    They only show cells with fused attention, so that its gain is not credited to merging.
    """
    timed = _timed(cells)
    return [*_against_resolution(timed), *_against_ratio(timed), *_against_closeness(timed, quality)]


def _against_resolution(cells: Sequence[CellRecord]) -> Iterable[Chart]:
    def rest(cell: CellRecord) -> tuple[object, ...]:
        names = (name for name in (*SETTING, "compile") if name not in ("width", "height"))
        return tuple(cell.conditions[name] for name in names)

    for group in grouped(cells, rest):
        # Fewer steps take the time of a method by definition, so they would say nothing new here.
        left_out = (DENSE, FEWER_STEPS)
        found = [cell for cell in group if cell.conditions["variant"] not in left_out and cell.speedup]
        if len({_side(cell) for cell in found}) < 2:
            continue
        lines = [
            Line(label, tuple(sorted((_side(c), c.speedup or 0.0) for c in members)))
            for label in sorted({cell.label for cell in found})
            if len(members := [cell for cell in found if cell.label == label]) > 1
        ]
        if not lines:
            continue
        conditions = found[0].conditions
        title = _without_size(conditions)
        yield Chart(
            f"Speed-up against resolution: {title}",
            "√(width × height), pixels",
            "speed-up, t_dense / t",
            tuple(lines),
            level=("dense", 1.0),
        )


def _against_ratio(cells: Sequence[CellRecord]) -> Iterable[Chart]:
    def where(cell: CellRecord) -> tuple[object, ...]:
        return *where_of(cell), cell.conditions["compile"]

    for found in grouped(cells, where):
        with_ratio = [cell for cell in found if "ratio" in cell.conditions["settings"]]
        if len({cell.conditions["settings"]["ratio"] for cell in with_ratio}) < 2:
            continue
        lines = [
            Line(name, tuple(sorted((c.conditions["settings"]["ratio"], c.median or 0.0) for c in members)))
            for name, members in _by_family(with_ratio)
        ]
        dense = next((cell.median for cell in found if cell.conditions["variant"] == "dense"), None)
        compiled = ", compiled" if found[0].conditions["compile"] else ""
        yield Chart(
            f"Time against ratio: {setting_name(found[0].conditions)}{compiled}",
            "ratio of tokens removed",
            "seconds per call",
            tuple(lines),
            level=None if dense is None else ("dense", dense),
            from_zero=True,
        )


def _against_closeness(cells: Sequence[CellRecord], quality: Sequence[QualityRecord]) -> Iterable[Chart]:
    whole = [record for record in quality if record.category is None]
    for records in grouped(whole, where_drawn):
        first, *_ = metrics = metric_names(records)
        for metric in metrics:
            lines = tuple(_lines_of_methods(records, metric, cells))
            if lines and (metric == first or _varies(lines)):
                with_dense = any(line.name == "dense" for line in lines)
                closer = "lower" if metric in LOWER_IS_CLOSER else "higher"
                yield Chart(
                    f"{AGAINST_CLOSENESS}{quality_name(records[0])}",
                    f"{metric.upper()}, {closer} is better",
                    "speed-up, t_dense / t",
                    lines,
                    level=None if with_dense else ("dense", 1.0),
                    metric=metric,
                )


def _varies(lines: Sequence[Line]) -> bool:
    points = [x for line in lines for x, _ in line.points]
    return len(points) == 1 or len(set(points)) > 1


def _lines_of_methods(
    records: Sequence[QualityRecord], metric: str, cells: Sequence[CellRecord]
) -> Iterable[Line]:
    """Return one line for each method, with a point for each ratio, and one line for fewer steps.

    The speed-up is from the benchmark if it has the variant, otherwise from the evaluation. A number of fewer
    steps may be timed beside several methods. Its point is then the median.
    """
    families: dict[str, dict[float, list[tuple[float, float]]]] = {}
    for record in records:
        speedup = _speedup(record, cells)
        if speedup is not None and metric in record.figures:
            family = families.setdefault(_family(record.variant, record.settings), {})
            family.setdefault(_knob(record), []).append((record.figures[metric], speedup))
    for name, found in sorted(families.items()):
        # Join points in the order of ratio or steps, since metrics of few pictures may not be monotonic.
        knobs = sorted(found)
        points = tuple(
            (median(x for x, _ in found[knob]), median(y for _, y in found[knob])) for knob in knobs
        )
        yield Line(name, points, tuple("" if math.isnan(knob) else f"{knob:g}" for knob in knobs))


def _speedup(record: QualityRecord, cells: Sequence[CellRecord]) -> float | None:
    """Return the speed-up of a variant at the number of steps of its pictures; None if it is unknown."""
    cell = cell_of_pictures(record.label, record.drawn_with, cells)
    if cell is None or cell.speedup is None:
        return record.speedup
    # With as many steps as dense, fewer-steps is the dense run.
    is_dense = cell.facts.get("steps_used") == cell.conditions["steps"]
    return cell.speedup if _same_steps(record, cell) and not is_dense else None


def missing_for_curves(cells: Iterable[CellRecord], quality: Sequence[QualityRecord]) -> list[str]:
    """Make a note for each set of pictures with variants that are in no chart because they were not timed."""
    timed = _timed(cells)
    found = []
    for records in grouped([record for record in quality if record.category is None], where_drawn):
        untimed = [
            record.label
            for record in records
            if record.variant != DENSE
            and record.speedup is None
            and cell_of_pictures(record.label, record.drawn_with, timed) is None
        ]
        if untimed:
            found.append(
                f"no chart of speed-up against closeness of {quality_name(records[0])} has "
                f"{', '.join(untimed)}: their time is unknown; run tokenmerge evaluate with a new results "
                "file to draw and time them"
            )
    return found


def timed_with_other_steps(cells: Iterable[CellRecord], quality: Iterable[QualityRecord]) -> list[str]:
    """Make a note for each variant that was drawn with one number of steps and timed with another."""
    timed = _timed(cells)
    found = []
    for record in quality:
        cell = cell_of_pictures(record.label, record.drawn_with, timed)
        if record.category is None and cell is not None and not _same_steps(record, cell):
            drawn = record.steps_used or "an unknown number of"
            found.append(
                f"{record.label} of {quality_name(record)} is in no chart of speed-up against closeness: "
                f"drawn with {drawn} steps, timed with {cell.facts.get('steps_used')}; run tokenmerge "
                "evaluate again"
            )
    return found


def _timed(cells: Iterable[CellRecord]) -> list[CellRecord]:
    return [c for c in cells if c.median is not None and c.conditions["attention"] == _FUSED]


def _same_steps(record: QualityRecord, cell: CellRecord) -> bool:
    return record.steps_used == cell.facts.get("steps_used")


def _by_family(cells: Sequence[CellRecord]) -> Iterable[tuple[str, list[CellRecord]]]:
    families: dict[str, list[CellRecord]] = {}
    for cell in cells:
        name = _family(cell.conditions["variant"], cell.conditions["settings"])
        families.setdefault(name, []).append(cell)
    return sorted(families.items())


def _family(variant: str, settings: Mapping[str, Any]) -> str:
    """Name a variant without the settings that make it faster, so that one name stands for one line.

    >>> _family("tome", {"ratio": 0.5, "merge_mlp": True})
    'tome merge_mlp'
    """
    return variant_label(variant, {name: value for name, value in settings.items() if name not in _KNOBS})


def _knob(record: QualityRecord) -> float:
    if record.steps_used is not None:
        return float(record.steps_used)
    return float(next((record.settings[name] for name in _KNOBS if name in record.settings), math.nan))


def _side(cell: CellRecord) -> float:
    return math.sqrt(cell.conditions["width"] * cell.conditions["height"])


def _without_size(conditions: Any) -> str:
    name = setting_name(conditions)
    size = name.split(", ")[1]
    return name.replace(f", {size}", "", 1)
