"""What a report is made of, the same for every format."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from tokenmerge.bench.records import CellRecord
from tokenmerge.reporting.beside import published_tables
from tokenmerge.reporting.curves import Chart, charts
from tokenmerge.reporting.quality import LOWER_IS_CLOSER, QualityRecord, metric_names
from tokenmerge.reporting.results import Results, Sample
from tokenmerge.reporting.tables import Row, Table, measured_tables

__all__ = ["TITLE", "Content", "content_of"]

TITLE = "Token merging: time, memory and price"


@dataclasses.dataclass(frozen=True)
class Content:
    """Everything that a report shows.

    Args:
        measured: a table for each setting.
        beside: published tables with our figures beside them.
        quality: closeness of variants to dense.
        charts: plots.
        samples: pairs of pictures.
        conditions: (name, JSON) of each machine and configuration that cells were measured on, and of each
            set of pictures.
        notes: what the reader should know, in words.
    """

    measured: tuple[Table, ...]
    beside: tuple[Table, ...]
    quality: tuple[Table, ...]
    charts: tuple[Chart, ...]
    samples: tuple[Sample, ...]
    conditions: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def content_of(results: Results) -> Content:
    """Arrange records for a reader."""
    return Content(
        measured=tuple(measured_tables(results.cells)),
        beside=tuple(published_tables(results.cells, results.quality)),
        quality=tuple(_quality_tables(results.quality)),
        charts=tuple(charts(results.cells, results.quality)),
        samples=results.samples,
        conditions=(*_conditions(results.cells), *_conditions_of_quality(results.quality)),
        notes=results.notes,
    )


def _quality_tables(records: Sequence[QualityRecord]) -> list[Table]:
    tables = []
    for where in dict.fromkeys((record.model, record.width, record.height) for record in records):
        found = [record for record in records if (record.model, record.width, record.height) == where]
        metrics = metric_names(found)
        arrows = tuple(f"{name} {'↓' if name in LOWER_IS_CLOSER else '↑'}" for name in metrics)
        by_category = any(record.category is not None for record in found)
        header = ("variant", *(["category"] if by_category else []), "pictures", *arrows)
        rows = tuple(
            Row(
                (
                    record.label,
                    *([record.category or "all"] if by_category else []),
                    str(record.images),
                    *(_figure(record.figures.get(name)) for name in metrics),
                )
            )
            for record in found
        )
        notes = dict.fromkeys(note for record in found for note in record.notes)
        model, width, height = where
        title = f"{model}, {width} × {height}"
        tables.append(
            Table(title, header, rows, ("↑ higher, ↓ lower is better", *notes), words=1 + by_category)
        )
    return tables


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _conditions(cells: Sequence[CellRecord]) -> list[tuple[str, str]]:
    """What all cells of one run share, each once."""
    shared: dict[str, str] = {}
    varying = ("variant", "settings", "attention", "compile", "width", "height", "batch", "model", "frames")
    for cell in cells:
        common: dict[str, Any] = {k: v for k, v in cell.conditions.items() if k not in varying}
        common["peak memory"] = cell.facts.get("peak_memory")
        text = json.dumps(common, indent=2, ensure_ascii=False, sort_keys=True)
        versions = common["environment"]["versions"]
        name = f"{common['device_name']}, {common['scope']}, {common['dtype']}, torch {versions['torch']}"
        shared.setdefault(text, name)
    return [(name, text) for text, name in shared.items()]


def _conditions_of_quality(records: Sequence[QualityRecord]) -> list[tuple[str, str]]:
    """What the pictures of all variants share, each once."""
    shared: dict[str, str] = {}
    for record in records:
        if record.conditions:
            common = {"model": record.model, **record.conditions, "measured_with": record.measured_with}
            text = json.dumps(common, indent=2, ensure_ascii=False, sort_keys=True)
            shared.setdefault(text, f"Pictures of {record.model}, {record.width} × {record.height}")
    return [(name, text) for text, name in shared.items()]
