"""The content of a report, which is the same for every format."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from tokenmerge.errors import ConfigError
from tokenmerge_tools.records.kinds import CellRecord
from tokenmerge_tools.reporting.curves import Chart, charts, missing_for_curves, timed_with_other_steps
from tokenmerge_tools.reporting.latest import newest_cells, newest_figures
from tokenmerge_tools.reporting.pictures import picture_type
from tokenmerge_tools.reporting.price_tables import fastest_table, price_tables, summary
from tokenmerge_tools.reporting.quality import QualityRecord
from tokenmerge_tools.reporting.quality_tables import quality_tables
from tokenmerge_tools.reporting.results import Results, Sample
from tokenmerge_tools.reporting.tables import Table, measured_tables
from tokenmerge_tools.reporting.versus_published import published_tables

TITLE = "Token merging: speed, memory and quality"


@dataclasses.dataclass(frozen=True)
class Content:
    """Everything that a report shows.

    ``prices`` has tables of the speed and closeness of each variant, and ``fastest`` the best of them.
    ``beside`` has published tables with our measurements. ``conditions`` has the (name, JSON) of each machine
    and configuration, and of each set of pictures.
    """

    summary: str
    fastest: Table | None
    prices: tuple[Table, ...]
    measured: tuple[Table, ...]
    beside: tuple[Table, ...]
    quality: tuple[Table, ...]
    charts: tuple[Chart, ...]
    samples: tuple[Sample, ...]
    conditions: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def content_of(results: Results) -> Content:
    """Collect the content from the newest record of each name, and from the samples that exist."""
    cells, older_cells = newest_cells(results.cells)
    quality, older_figures = newest_figures(results.quality)
    samples, lost = _readable(results.samples)
    drawn = charts(cells, quality)
    return Content(
        summary=summary(cells, drawn),
        fastest=fastest_table(drawn),
        prices=tuple(price_tables(drawn)),
        measured=tuple(measured_tables(cells)),
        beside=tuple(published_tables(cells, quality)),
        quality=tuple(quality_tables(quality)),
        charts=tuple(drawn),
        samples=tuple(samples),
        conditions=(*_conditions(cells), *_conditions_of_quality(quality)),
        notes=(
            *results.notes,
            *older_cells,
            *older_figures,
            *timed_with_other_steps(cells, quality),
            *missing_for_curves(cells, quality),
            *lost,
        ),
    )


def _readable(samples: Sequence[Sample]) -> tuple[list[Sample], list[str]]:
    """Select the pairs with two readable pictures, and make one note about all others."""
    found, lost = [], []
    for sample in samples:
        try:
            for path in (sample.dense, sample.image):
                picture_type(path)
        except ConfigError as error:
            lost.append(f"{sample.record.label}, seed {sample.record.seed}: {error}")
        else:
            found.append(sample)
    pairs = "1 pair of sample pictures is" if len(lost) == 1 else f"{len(lost)} pairs of sample pictures are"
    return found, [f"{pairs} not shown; the first is {lost[0]}"] if lost else []


def _conditions(cells: Sequence[CellRecord]) -> list[tuple[str, str]]:
    """The conditions that all cells of a run share, once for each run."""
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
    """The conditions that the pictures of all variants share, once for each set of pictures."""
    shared: dict[str, str] = {}
    for record in records:
        if record.conditions:
            common = {"model": record.model, **record.conditions, "measured_with": record.measured_with}
            text = json.dumps(common, indent=2, ensure_ascii=False, sort_keys=True)
            shared.setdefault(text, f"Pictures of {record.model}, {record.width} × {record.height}")
    return [(name, text) for text, name in shared.items()]
