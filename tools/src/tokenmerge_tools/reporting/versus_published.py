"""Published tables, with rows for our measurements."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from tokenmerge_tools.records.kinds import CellRecord
from tokenmerge_tools.reporting.published import Published, published_rows
from tokenmerge_tools.reporting.quality import QualityRecord
from tokenmerge_tools.reporting.quality_tables import quality_name
from tokenmerge_tools.reporting.tables import (
    OURS,
    PUBLISHED,
    Table,
    TableRow,
    attention_name,
    attention_rank,
    machine_name,
    sampling_name,
    times,
)

_ATTENTION_ORDER = ("default", "sdpa", "xformers")
_IMPLEMENTATIONS = {"tome": "tokenmerge", "tomesd": "tomesd"}


class _Column(NamedTuple):
    """A column of a table. A ratio of 0 stands for dense, a higher one for ToMe."""

    attention: str
    ratio: float

    def __str__(self) -> str:
        method = f"ToMe {self.ratio:g}" if self.ratio else "dense"
        return f"{method}, {attention_name(self.attention).removesuffix(' attention')}"


class _Line(NamedTuple):
    resolution: int
    batch: int | None
    who: str
    origin: str


@dataclasses.dataclass(frozen=True)
class _Figure:
    """The quantity in one table, and how to read it from published rows and from our cells.

    ``takes`` says whether a cell of ours is comparable.
    """

    name: str
    published: Callable[[Published], float | None]
    ours: Callable[[CellRecord], float | None]
    is_time: bool = False
    takes: Callable[[CellRecord], bool] = lambda cell: True


def _seconds(cell: CellRecord) -> float | None:
    """Seconds per call of the pipeline, or of the denoiser times the number of steps."""
    if cell.median is None:
        return None
    return cell.median if cell.conditions["scope"] == "pipeline" else cell.median * cell.conditions["steps"]


def _per_image(cell: CellRecord) -> float | None:
    seconds = _seconds(cell)
    return None if seconds is None else seconds / cell.conditions["batch"]


def _memory(cell: CellRecord) -> float | None:
    return None if cell.peak_bytes is None else cell.peak_bytes / 1e9 / cell.conditions["batch"]


_FIGURES = {
    "per call": _Figure("seconds per call", lambda row: row.seconds, _seconds, is_time=True),
    "per image": _Figure("seconds per image", lambda row: row.seconds_per_image, _per_image, is_time=True),
    # On a CPU, the peak includes the whole process, so it is not comparable.
    "memory": _Figure(
        "GB per image", lambda row: row.memory, _memory, takes=lambda cell: cell.conditions["device"] != "cpu"
    ),
}


def published_tables(cells: Iterable[CellRecord], quality: Iterable[QualityRecord] = ()) -> list[Table]:
    """Make each published table that shares resolutions and batches with our cells of Stable Diffusion 1.5.

    Published rows are marked. Our rows name the machine and the number of steps. For the denoiser alone, they
    say that the time is that of one step times the number of steps. Our FID comes from the quality records.
    """
    ours = [cell for cell in cells if _comparable(cell)]
    drawn = [record for record in quality if "fid" in record.figures and _is_sd15(record.model)]
    tables = []
    for source in dict.fromkeys(row.source for row in published_rows()):
        rows = [row for row in published_rows() if row.source == source and _matches(row, ours)]
        for figure in _FIGURES.values():
            known = [row for row in rows if figure.published(row) is not None or row.out_of_memory]
            taken = [cell for cell in ours if figure.takes(cell)]
            if taken and any(figure.published(row) is not None for row in known):
                tables.append(_table(source, figure, known, taken))
        if any(row.fid is not None for row in rows):
            tables.append(_fid_table(source, rows, drawn))
    return tables


def _is_sd15(model: str) -> bool:
    return model == "geometry:sd15" or "stable-diffusion-v1" in model.lower()


def _comparable(cell: CellRecord) -> bool:
    conditions = cell.conditions
    return (
        _is_sd15(conditions["model"])
        and conditions["width"] == conditions["height"]
        and not conditions["compile"]
        and (conditions["variant"] == "dense" or set(conditions["settings"]) == {"ratio"})
        and conditions["variant"] in ("dense", *_IMPLEMENTATIONS)
    )


def _matches(row: Published, ours: Sequence[CellRecord]) -> bool:
    return any(
        row.resolution == cell.conditions["width"] and row.batch in (None, cell.conditions["batch"])
        for cell in ours
    )


def _table(source: str, figure: _Figure, published: Sequence[Published], ours: Sequence[CellRecord]) -> Table:
    lines: dict[_Line, dict[_Column, float | str]] = {}
    ratios = {row.ratio for row in published}
    for row in published:
        line = _Line(row.resolution, row.batch, f"published, {row.device}", PUBLISHED)
        value = figure.published(row)
        lines.setdefault(line, {})[_Column(row.attention, row.ratio)] = "OOM" if value is None else value
    for cell in ours:
        conditions = cell.conditions
        if not any(
            row.resolution == conditions["width"] and row.batch in (None, conditions["batch"])
            for row in published
        ):
            continue
        column = _Column(conditions["attention"], conditions["settings"].get("ratio", 0.0))
        if column.ratio not in ratios:
            continue
        for who in _who(cell):
            line = _Line(conditions["width"], conditions["batch"], who, OURS)
            lines.setdefault(line, {})[column] = _shown(cell, figure)
    merging = {line: found for line, found in lines.items() if any(column.ratio for column in found)}
    columns = sorted(
        {column for found in merging.values() for column in found},
        key=lambda column: (attention_rank(column.attention, _ATTENTION_ORDER), column.ratio),
    )
    ordered = sorted(
        merging, key=lambda line: (line.resolution, line.batch or 0, line.origin == OURS, line.who)
    )
    rows = [
        TableRow(
            (
                line.who,
                f"{line.resolution}²",
                "" if line.batch is None else str(line.batch),
                *(_text(column, merging[line], figure) for column in columns),
            ),
            line.origin,
        )
        for line in ordered
    ]
    notes = dict.fromkeys(row.note for row in published if row.note)
    return Table(
        f"{source}: {figure.name}",
        ("measured by", "resolution", "batch", *map(str, columns)),
        tuple(rows),
        (
            *(f"published: {note}" for note in notes),
            *_notes_on_speedup(figure, published),
            *_notes_on_memory(figure, ours),
        ),
    )


def _shown(cell: CellRecord, figure: _Figure) -> str:
    """Format a cell's value, with the speed-up within its own rounds."""
    value = figure.ours(cell)
    if value is None:
        return "OOM" if cell.status == "oom" else "–"
    merges = figure.is_time and cell.conditions["settings"].get("ratio")
    speedup = times(cell.speedup_same_attention) if merges else ""
    return f"{value:.3g} ({speedup})" if speedup else f"{value:.3g}"


def _notes_on_speedup(figure: _Figure, published: Sequence[Published]) -> list[str]:
    if not figure.is_time:
        return []
    notes = [
        "× is the speed-up t_dense / t over dense with the same attention; dense is in the same row for "
        "published figures, and was timed in the same rounds for ours"
    ]
    attentions = {row.attention for row in published}
    for attention in attentions - {row.attention for row in published if not row.merges}:
        name = attention_name(attention)
        notes.append(
            f"dense with {name} was not published, so the gain of this attention cannot be separated from "
            "that of merging"
        )
    return notes


def _notes_on_memory(figure: _Figure, ours: Sequence[CellRecord]) -> list[str]:
    """Say what our memory figures count."""
    if figure.is_time:
        return []
    meanings = dict.fromkeys(cell.facts.get("peak_memory") for cell in ours)
    return [f"our memory: {meaning}, divided by the batch" for meaning in meanings if meaning]


def _who(cell: CellRecord) -> list[str]:
    """The rows that a cell belongs to. Dense belongs to the row of each implementation."""
    conditions = cell.conditions
    names = list(_IMPLEMENTATIONS) if conditions["variant"] == "dense" else [conditions["variant"]]
    alone = "" if conditions["scope"] == "pipeline" else "denoiser × "
    how = f"{machine_name(conditions)}, {conditions['dtype']}, {alone}{sampling_name(conditions)}"
    return [f"{_IMPLEMENTATIONS[name]}, {how}" for name in names]


def _text(column: _Column, found: dict[_Column, float | str], figure: _Figure) -> str:
    value = found.get(column, "")
    if isinstance(value, str):
        return value
    dense = found.get(_Column(column.attention, 0.0))
    if figure.is_time and column.ratio and isinstance(dense, float):
        return f"{value:.3g} ({times(dense / value)})"
    return f"{value:.3g}"


def _fid_table(source: str, rows: Sequence[Published], ours: Sequence[QualityRecord]) -> Table:
    ratios = sorted({row.ratio for row in rows})
    published = {row.ratio: row.fid for row in rows}
    (resolution,) = {row.resolution for row in rows}
    found: dict[str, dict[float, float]] = {}
    for record in ours:
        plain = record.variant in ("dense", "tome") and set(record.settings) <= {"ratio"}
        if plain and record.width == record.height == resolution:
            ratio = record.settings.get("ratio", 0.0)
            found.setdefault(quality_name(record), {})[ratio] = record.figures["fid"]
    lines = [TableRow(("published", *(f"{published[ratio]:.2f}" for ratio in ratios)), PUBLISHED)]
    for name, fids in found.items():
        lines.append(TableRow((f"tokenmerge, {name}", *(_fid(fids.get(ratio)) for ratio in ratios))))
    header = ("measured by", *(f"ToMe {ratio:g}" if ratio else "dense" for ratio in ratios))
    notes = ("FID depends on the reference pictures and the feature extractor: compare only within a row",)
    return Table(f"{source}: FID", header, tuple(lines), notes)


def _fid(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
