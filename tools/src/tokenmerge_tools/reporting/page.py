"""The page of a report: its content, and the HTML."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Hashable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from tokenmerge.errors import ConfigError, MissingExtraError
from tokenmerge_tools.files import read_bytes
from tokenmerge_tools.records.file import Results, Sample
from tokenmerge_tools.records.kinds import CellRecord, QualityRecord
from tokenmerge_tools.reporting.curves import AGAINST_CLOSENESS, Chart, charts, notes_on_charts
from tokenmerge_tools.reporting.plots import draw
from tokenmerge_tools.reporting.price_tables import fastest_table, price_tables
from tokenmerge_tools.reporting.tables import (
    Table,
    measured_tables,
    quality_tables,
    what_of,
    where_drawn,
    where_of,
)

R = TypeVar("R", CellRecord, QualityRecord)

TITLE = "Token merging: speed, memory and quality"
_PNG = b"\x89PNG\r\n\x1a\n"  # the first bytes of a PNG file


@dataclasses.dataclass(frozen=True)
class Content:
    """Everything that a report shows.

    ``prices`` has tables of the speed and closeness of each variant, and ``fastest`` the best of them.
    ``conditions`` has the (name, JSON) of each machine and configuration, and of each set of images.
    """

    fastest: Table | None
    prices: tuple[Table, ...]
    measured: tuple[Table, ...]
    quality: tuple[Table, ...]
    charts: tuple[Chart, ...]
    samples: tuple[Sample, ...]
    conditions: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def content_of(results: Results) -> Content:
    """Collect the content from the newest record of each name, and from the samples that exist."""
    cells, older_cells = newest(results.cells)
    quality, older_figures = newest(results.quality)
    samples, lost = _readable(results.samples)
    drawn = charts(cells, quality)
    return Content(
        fastest=fastest_table(drawn),
        prices=tuple(price_tables(drawn)),
        measured=tuple(measured_tables(cells)),
        quality=tuple(quality_tables(quality)),
        charts=tuple(drawn),
        samples=tuple(samples),
        conditions=tuple(_conditions(cells, quality)),
        notes=(*results.notes, *older_cells, *older_figures, *notes_on_charts(cells, quality), *lost),
    )


def _readable(samples: Sequence[Sample]) -> tuple[list[Sample], list[str]]:
    """Select the pairs with two readable images, and make one note about all others."""
    found = []
    lost = []
    for sample in samples:
        try:
            for path in (sample.dense, sample.image):
                data_address(path)
        except ConfigError as error:
            lost.append(f"{sample.record.label}, seed {sample.record.seed}: {error}")
        else:
            found.append(sample)
    pairs = "1 pair of sample images is" if len(lost) == 1 else f"{len(lost)} pairs of sample images are"
    return found, [f"{pairs} not shown; the first is {lost[0]}"] if lost else []


def _conditions(cells: Sequence[CellRecord], quality: Sequence[QualityRecord]) -> list[tuple[str, str]]:
    """List the conditions that all cells of a run share, and those that all variants of images share."""
    shared: dict[str, str] = {}
    varying = ("variant", "settings", "attention", "compile", "width", "height", "batch", "model", "frames")
    for cell in cells:
        run_conditions = {k: v for k, v in cell.conditions.items() if k not in varying}
        run_conditions["peak memory"] = cell.facts.get("peak_memory")
        torch = run_conditions["environment"]["versions"]["torch"]
        device, scope, dtype = (run_conditions[name] for name in ("device_name", "scope", "dtype"))
        name = f"{device}, {scope}, {dtype}, torch {torch}"
        shared.setdefault(_as_json(run_conditions), name)
    for record in quality:
        if record.conditions:
            image_conditions = {
                "model": record.model,
                **record.conditions,
                "measured_with": record.measured_with,
            }
            name = f"Images of {record.model}, {record.width} × {record.height}"
            shared.setdefault(_as_json(image_conditions), name)
    return [(name, text) for text, name in shared.items()]


def _as_json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False, sort_keys=True)


def newest(records: Sequence[R]) -> tuple[list[R], list[str]]:
    """Select the last record among those that would have the same name in the same table.

    If any is left out, a note names the conditions that differ.
    """
    found: dict[Hashable, R] = {}
    differs: set[str] = set()
    for record in sorted(records, key=lambda record: record.finished):
        name = _name(record)
        if name in found:
            before = found[name].conditions
            differs |= {key for key, value in record.conditions.items() if value != before.get(key)}
        found[name] = record
    older = len(records) - len(found)
    if not older:
        return list(found.values()), []
    what = "cells" if isinstance(records[0], CellRecord) else "quality records"
    said = f"{older} older {what} are left out; newer ones differ only in {', '.join(sorted(differs))}"
    return list(found.values()), [said]


def _name(record: CellRecord | QualityRecord) -> Hashable:
    if isinstance(record, CellRecord):
        return *where_of(record), what_of(record)
    return *where_drawn(record), record.label, record.category


def as_html(content: Content) -> str:
    """Write the page, which contains all images, plots, styles and scripts."""
    try:
        import jinja2
    except ImportError as error:
        raise MissingExtraError(
            "tokenmerge-tools[plots]", needed_by="the page of tokenmerge report needs Jinja2"
        ) from error
    # Everything is escaped, because prompts and names can contain any text.
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    text = (resources.files("tokenmerge_tools.reporting") / "page.html.j2").read_text(encoding="utf-8")
    drawn = [(chart, svg_address(draw(chart))) for chart in content.charts]
    sections = (
        ("measured", "Measured", content.measured),
        ("quality", "Closeness to dense", content.quality),
    )
    prices = []
    for table in content.prices:
        title = AGAINST_CLOSENESS + table.title
        prices.append((table, [(chart.title, address) for chart, address in drawn if chart.title == title]))
    return environment.from_string(text).render(
        title=TITLE,
        fastest=content.fastest,
        prices=prices,
        sections=[(anchor, name, *_shared_notes(tables)) for anchor, name, tables in sections if tables],
        samples=_by_prompt(content.samples),
        conditions=content.conditions,
        notes=content.notes,
    )


def _shared_notes(tables: Sequence[Table]) -> tuple[list[str], list[Table]]:
    """Return notes that all tables of a section have, and the tables without them."""
    first, *others = tables
    shared = [note for note in first.notes if others and all(note in table.notes for table in others)]
    kept = []
    for table in tables:
        notes = tuple(note for note in table.notes if note not in shared)
        kept.append(dataclasses.replace(table, notes=notes))
    return shared, kept


def _by_prompt(samples: Sequence[Sample]) -> list[tuple[str, list[dict[str, Any]]]]:
    rows: dict[str, list[dict[str, Any]]] = {}
    for sample in samples:
        pair = {
            "label": sample.record.label,
            "seed": sample.record.seed,
            "dense": data_address(sample.dense),
            "image": data_address(sample.image),
        }
        rows.setdefault(sample.record.prompt, []).append(pair)
    return list(rows.items())


def data_address(path: Path) -> str:
    """Encode a PNG file as a data URL."""
    content = read_bytes(path, "sample", "run tokenmerge evaluate again")
    if not content.startswith(_PNG):
        raise ConfigError(f"sample: {path} is not a PNG image; run tokenmerge evaluate again")
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def svg_address(svg: str) -> str:
    """Encode an SVG document as a data URL. As an image it runs no scripts, and its ids stay separate."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
