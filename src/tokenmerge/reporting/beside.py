"""The published tables, with what was measured here in rows of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from tokenmerge.bench.records import CellRecord
from tokenmerge.reporting.published import Published, published_rows
from tokenmerge.reporting.quality import QualityRecord
from tokenmerge.reporting.tables import OURS, PUBLISHED, Row, Table, attention_name, times

__all__ = ["published_tables"]

_ATTENTION_ORDER = ("default", "sdpa", "xformers")
_IMPLEMENTATIONS = {"tome": "tokenmerge", "tomesd": "tomesd"}


class _Column(NamedTuple):
    """Dense at ratio 0, ToMe above."""

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
    """What one published table shows, and where it is found in a published row and in a cell of ours."""

    name: str
    published: Callable[[Published], float | None]
    ours: Callable[[CellRecord], float | None]
    is_time: bool = False


def _seconds(cell: CellRecord) -> float | None:
    """Of a call of the pipeline; of the denoiser alone, times the number of steps."""
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
    "memory": _Figure("GB per image", lambda row: row.memory, _memory),
}


def published_tables(cells: Iterable[CellRecord], quality: Iterable[QualityRecord] = ()) -> list[Table]:
    """Each published table at whose resolutions and batches something of Stable Diffusion 1.5 was measured.

    Its rows are marked as published. Our rows say on what machine, and for the denoiser alone that the time
    is that of a step times the number of steps.

    Args:
        cells: measured cells.
        quality: figures of quality, for the column FID.
    """
    ours = [cell for cell in cells if _comparable(cell)]
    fids = {
        (record.height, record.settings["ratio"]): record.figures["fid"]
        for record in quality
        if "fid" in record.figures and record.variant == "tome" and set(record.settings) == {"ratio"}
    }
    tables = []
    for source in dict.fromkeys(row.source for row in published_rows()):
        rows = [row for row in published_rows() if row.source == source and _matches(row, ours)]
        for figure in _FIGURES.values():
            known = [row for row in rows if figure.published(row) is not None or row.out_of_memory]
            if any(figure.published(row) is not None for row in known):
                tables.append(_table(source, figure, known, ours))
        if any(row.fid is not None for row in rows):
            tables.append(_fid_table(source, rows, fids))
    return tables


def _comparable(cell: CellRecord) -> bool:
    conditions = cell.conditions
    model = conditions["model"].lower()
    return (
        (model == "geometry:sd15" or "stable-diffusion-v1" in model)
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
        value = figure.ours(cell)
        for who in _who(cell):
            line = _Line(conditions["width"], conditions["batch"], who, OURS)
            shown = value if value is not None else "OOM" if cell.status == "oom" else "–"
            lines.setdefault(line, {})[column] = shown
    merging = {line: found for line, found in lines.items() if any(column.ratio for column in found)}
    columns = sorted(
        {column for found in merging.values() for column in found},
        key=lambda column: (_ATTENTION_ORDER.index(column.attention), column.ratio),
    )
    ordered = sorted(
        merging, key=lambda line: (line.resolution, line.batch or 0, line.origin == OURS, line.who)
    )
    rows = [
        Row(
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
        ("who", "resolution", "batch", *map(str, columns)),
        tuple(rows),
        (*(f"published: {note}" for note in notes), *_told_against(figure, published)),
    )


def _told_against(figure: _Figure, published: Sequence[Published]) -> list[str]:
    if not figure.is_time:
        return []
    notes = ["× is t_dense / t against dense with the same attention in the same row"]
    attentions = {row.attention for row in published}
    for attention in attentions - {row.attention for row in published if not row.merges}:
        name = attention_name(attention)
        notes.append(
            f"dense with {name} was not published: its gain and that of merging cannot be told apart"
        )
    return notes


def _who(cell: CellRecord) -> list[str]:
    """The rows that a cell belongs to: dense to that of each implementation."""
    conditions = cell.conditions
    names = list(_IMPLEMENTATIONS) if conditions["variant"] == "dense" else [conditions["variant"]]
    scope = "" if conditions["scope"] == "pipeline" else f", denoiser × {conditions['steps']} steps"
    device = conditions["device_name"]
    return [f"{_IMPLEMENTATIONS[name]}, {device}, {conditions['dtype']}{scope}" for name in names]


def _text(column: _Column, found: dict[_Column, float | str], figure: _Figure) -> str:
    value = found.get(column, "")
    if isinstance(value, str):
        return value
    dense = found.get(_Column(column.attention, 0.0))
    if figure.is_time and column.ratio and isinstance(dense, float):
        return f"{value:.3g} ({times(dense / value)})"
    return f"{value:.3g}"


def _fid_table(source: str, rows: Sequence[Published], ours: dict[tuple[int, float], float]) -> Table:
    ratios = sorted({row.ratio for row in rows})
    published = {row.ratio: row.fid for row in rows}
    (resolution,) = {row.resolution for row in rows}
    lines = [Row(("published", *(f"{published[ratio]:.2f}" for ratio in ratios)), PUBLISHED)]
    if ours:
        lines.append(Row(("tokenmerge", *(_fid(ours.get((resolution, ratio))) for ratio in ratios))))
    header = ("who", *(f"ToMe {ratio:g}" if ratio else "dense" for ratio in ratios))
    notes = ("FID depends on the reference pictures and the feature extractor: compare along a row",)
    return Table(f"{source}: FID", header, tuple(lines), notes)


def _fid(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
