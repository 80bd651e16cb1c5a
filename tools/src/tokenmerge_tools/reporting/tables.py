"""Tables in plain text: those of measured cells, and of the quality of images."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, groupby
from typing import Any, TypeVar

from tokenmerge_tools.records.kinds import LOWER_IS_CLOSER, CellRecord, QualityRecord, key_of, metric_names

T = TypeVar("T")

# Conditions that the cells of one table have in common.
SETTING = (
    *("model", "scope", "width", "height", "frames", "batch", "dtype", "steps", "scheduler"),
    *("guidance", "device_name", "threads"),
)
BASELINES = ("dense", "oracle", "fewer-steps")
_ATTENTION = {"sdpa": "SDPA", "xformers": "xFormers", "default": "plain"}
# A speed-up up to this is within the noise of timing.
FASTER = 1.01


@dataclasses.dataclass(frozen=True)
class TableRow:
    """One row of a table. The ``best`` rows are marked."""

    cells: tuple[str, ...]
    best: bool = False


@dataclasses.dataclass(frozen=True)
class Table:
    """A titled table. The first ``words`` columns hold text, the others numbers."""

    title: str
    header: tuple[str, ...]
    rows: tuple[TableRow, ...]
    notes: tuple[str, ...] = ()
    words: int = 1


def measured_tables(cells: Iterable[CellRecord]) -> list[Table]:
    """Make one table for each setting."""
    return [_measured(group) for group in grouped(cells, where_of)]


def where_of(cell: CellRecord) -> tuple[Any, ...]:
    """Return what the cells of one table have in common."""
    return tuple(cell.conditions[name] for name in SETTING)


def what_of(cell: CellRecord) -> str:
    """Return what differs between the cells of one table: variant, attention and compilation."""
    compiled = ", compiled" if cell.conditions["compile"] else ""
    return f"{cell.label}, {attention_name(cell.conditions['attention'])}{compiled}"


def attention_name(attention: str) -> str:
    """Return the name of an attention implementation in a report.

    >>> attention_name("default")
    'plain attention'
    """
    return f"{_ATTENTION.get(attention, attention)} attention"


def call_name(conditions: Mapping[str, Any]) -> str:
    """Describe the timed call, without the machine."""
    frames = f" × {conditions['frames']} frames" if conditions["frames"] else ""
    whole = conditions["scope"] == "pipeline"
    size = f"{conditions['width']} × {conditions['height']}{frames}"
    what = f"{'whole pipeline,' if whole else 'denoiser alone, one of'} {sampling_name(conditions)}"
    return f"{conditions['model']}, {size}, batch {conditions['batch']}, {conditions['dtype']}, {what}"


def sampling_name(conditions: Mapping[str, Any]) -> str:
    """Return the number of steps, and the scheduler and guidance scale unless they are the model's defaults.

    >>> sampling_name({"steps": 50, "scheduler": "plms", "guidance": 7.5})
    '50 steps, plms, guidance 7.5'
    """
    steps, scheduler, guidance = (conditions[name] for name in ("steps", "scheduler", "guidance"))
    extras = "" if scheduler is None else f", {scheduler}"
    extras += "" if guidance is None else f", guidance {guidance:g}"
    return f"{steps} step{'s' if steps > 1 else ''}{extras}"


def _measured(cells: Sequence[CellRecord]) -> Table:
    methods = [cell.speedup for cell in cells if cell.speedup and cell.conditions["variant"] not in BASELINES]
    fastest = max(methods, default=0.0)
    rows = []
    for cell in sorted(cells, key=_rank):
        rows.append(TableRow(_figures(cell), best=fastest > FASTER and cell.speedup == fastest))
    notes = [f"{what_of(cell)}: {cell.message}" for cell in cells if cell.status != "ok"]
    of_cells = chain.from_iterable(map(_notes, cells))
    notes += once(of_cells, [cell.label for cell in cells])
    meanings = dict.fromkeys(cell.facts.get("peak_memory") for cell in cells if cell.peak_bytes is not None)
    notes += [f"peak GiB: {meaning}" for meaning in meanings if meaning]
    if fastest > FASTER:
        notes.append("marked row: the fastest variant that is not a baseline")
    elif methods:
        notes.append("no variant is faster than dense")
    header = (
        *("variant", "attention", "seconds per call", "quartiles", "peak GiB", "speed-up"),
        *("same attention", "time saved", "FLOPs saved"),
    )
    conditions = cells[0].conditions
    title = f"{call_name(conditions)}, {conditions['device_name']}"
    if conditions["device"] == "cpu":
        title += f", {conditions['threads']} thread{'s' if conditions['threads'] > 1 else ''}"
    return Table(title, header, tuple(rows), tuple(notes), words=2)


def once(notes: Iterable[str], labels: Sequence[str]) -> list[str]:
    """Merge notes that say the same about several variants.

    >>> once(["a: slow", "b: slow", "cold", "a: large"], ["a", "b"])
    ['slow (a, b)', 'cold', 'large (a)']
    """
    found: dict[str, list[str]] = {}
    for note in notes:
        label = next((label for label in labels if note.startswith(f"{label}: ")), None)
        said = found.setdefault(note if label is None else note.removeprefix(f"{label}: "), [])
        if label is not None and label not in said:
            said.append(label)
    return [f"{note} ({', '.join(said)})" if said else note for note, said in found.items()]


def _notes(cell: CellRecord) -> list[str]:
    notes: list[str] = list(cell.facts.get("notes", []))
    of_variant = cell.facts.get("steps_used") is not None or "flops_dense" in cell.facts
    shared = ("random weights", "cut to", "without the text encoders")
    return [note if note.startswith(shared) or not of_variant else f"{cell.label}: {note}" for note in notes]


def _rank(cell: CellRecord) -> tuple[Any, ...]:
    conditions = cell.conditions
    order = {"dense": 0, "oracle": 8, "fewer-steps": 9}
    settings = conditions["settings"]
    attention = conditions["attention"]
    known = list(_ATTENTION)
    return (
        conditions["compile"],
        (known.index(attention) if attention in known else len(known), attention),
        order.get(conditions["variant"], 1),
        conditions["variant"],
        settings.get("ratio", 0),
        cell.label,
    )


def _figures(cell: CellRecord) -> tuple[str, ...]:
    compiled = ", compiled" if cell.conditions["compile"] else ""
    attention = cell.conditions["attention"]
    names = (cell.label, _ATTENTION.get(attention, attention) + compiled)
    if cell.median is None or cell.iqr is None:
        said = {"oom": "OOM", "unavailable": "not available", "error": "failed"}[cell.status]
        return (*names, said, "", "", "", "", "", "")
    low, high = cell.iqr
    saved = None if cell.speedup is None else 1 - 1 / cell.speedup
    dense, merged = (cell.facts.get(name) for name in ("flops_dense", "flops_merged"))
    return (
        *names,
        f"{cell.median:.3g}",
        f"{low:.3g} to {high:.3g}",
        "" if cell.peak_bytes is None else f"{cell.peak_bytes / 2**30:.2f}",
        times(cell.speedup),
        times(cell.speedup_same_attention),
        _percent(saved),
        _percent(None if not dense or merged is None else 1 - merged / dense),
    )


def times(ratio: float | None) -> str:
    """Format a speed-up.

    >>> times(1.5)
    '1.50×'
    """
    return "" if ratio is None else f"{ratio:.2f}×"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def grouped(items: Iterable[T], key: Callable[[T], Iterable[object]]) -> list[list[T]]:
    """Group items with equal keys, in the order of the keys. A key is several values, which may be None.

    >>> grouped(["b", "ab", "a"], lambda text: (len(text),))
    [['b', 'a'], ['ab']]
    """

    def order(item: T) -> tuple[object, ...]:
        return tuple((value is None, 0 if value is None else value) for value in key(item))

    return [list(group) for _, group in groupby(sorted(items, key=order), key=order)]


# Conditions that the images of one table have in common, in addition to the model and the size.
_SHARED = ("steps", "scheduler", "guidance", "dtype", "device", "attention", "prompts", "seeds")

# Metrics that are neither higher nor lower for closer images.
_AIMS = {"motion": " → 1"}

_MOTION = (
    "videos: metrics of images are means over the frames; motion: 0 for a frozen video, 1 for as much "
    "motion as dense; motion-error: 0 for the same motion as dense"
)
_BY_OPERATIONS = (
    "by operations: dense operations over those of the variant; those of other packages are counted in runs"
)
_GLYPHS = "glyphs: share of the images that show the emoji that the prompt names"
_ERRORS = "± standard error of the mean over the images"
# The costs of an image. Each has a header and a function that formats it.
_COSTS: dict[str, tuple[str, Callable[[float], str]]] = {
    "counted": ("by operations", lambda speedup: f"{speedup:.2f}×"),
    "seconds": ("seconds", lambda seconds: f"{seconds:.3g}"),
    "peak_bytes": ("peak GiB", lambda size: f"{size / 2**30:.2f}"),
}
_ROUNDING = 1e-6  # the rounding error in the SSIM of equal images
_BY_THE_CLOCK = "by the clock: t_dense / t per image, median and quartiles"


def where_drawn(record: QualityRecord) -> tuple[str, int, int, str]:
    """Return what the records of one table have in common."""
    shared = key_of({name: record.conditions.get(name) for name in (*_SHARED, "frames")})
    return record.model, record.width, record.height, shared


def quality_name(record: QualityRecord) -> str:
    """Return the title of the record's table."""
    parts = [record.model, f"{record.width} × {record.height}"]
    frames = record.conditions.get("frames")
    if frames is not None:
        parts.append(f"{frames} frames")
    if set(_SHARED) <= set(record.conditions):
        c = record.conditions
        count = c["prompts"]["count"]
        seeds = c["seeds"]
        parts += [
            sampling_name(c),
            f"{c['dtype']} on {c['device']}",
            attention_name(c["attention"]),
            f"{count} prompt{'s' if count > 1 else ''}",
            f"seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"seed {seeds[0]}",
        ]
    return ", ".join(parts)


def quality_tables(records: Sequence[QualityRecord]) -> list[Table]:
    """Make one table for each set of images, with a row for each variant and category."""
    by_place: dict[tuple[str, int, int, str], list[QualityRecord]] = {}
    for record in records:
        by_place.setdefault(where_drawn(record), []).append(record)
    return list(map(_table, by_place.values()))


def _table(records: Sequence[QualityRecord]) -> Table:
    metrics = metric_names(records)
    arrows = [f"{name}{_AIMS.get(name, ' ↓' if name in LOWER_IS_CLOSER else ' ↑')}" for name in metrics]
    timed = any(record.speedup is not None for record in records)
    costs = [name for name in _COSTS if any(name in record.cost for record in records)]
    by_category = any(record.category is not None for record in records)

    def row(record: QualityRecord) -> TableRow:
        category = [record.category or "all"] if by_category else []
        speedup = [_speedup(record)] if timed else []
        figures = (_figure(record, name) for name in metrics)
        cost = (_COSTS[name][1](record.cost[name]) if name in record.cost else "" for name in costs)
        return TableRow((record.label, *category, str(record.images), *speedup, *cost, *figures))

    names = [_COSTS[name][0] for name in costs]
    words = ["variant"]
    if by_category:
        words.append("category")
    header = [*words, "images"]
    if timed:
        header.append("by the clock")
    header += [*names, *arrows]
    notes = ["↑ higher, ↓ lower is better; psnr in dB"]
    if timed:
        notes.append(_BY_THE_CLOCK)
    if "counted" in costs:
        notes.append(_BY_OPERATIONS)
    if any(record.errors for record in records):
        notes.append(_ERRORS)
    if "glyphs" in metrics:
        notes.append(_GLYPHS)
    if "motion" in metrics:
        notes.append(_MOTION)
    of_records = chain.from_iterable(record.notes for record in records)
    notes += once(of_records, [record.label for record in records])
    rows = tuple(map(row, records))
    return Table(quality_name(records[0]), tuple(header), rows, tuple(notes), words=len(words))


def _speedup(record: QualityRecord) -> str:
    if record.speedup is None or record.speedup_quartiles is None:
        return ""
    median, low, high = (f"{value:.2f}" for value in (record.speedup, *record.speedup_quartiles))
    return f"{median}×" if low == high else f"{median}× ({low} to {high})"


def _figure(record: QualityRecord, name: str) -> str:
    # If all images equal dense, their PSNR is infinite and not recorded. Their SSIM is 1 up to rounding.
    equal = record.figures.get("ssim", 0) > 1 - _ROUNDING
    if name == "psnr" and name not in record.figures and equal:
        return "identical"
    if name not in record.figures:
        return ""
    error = f" ± {record.errors[name]:.2g}" if name in record.errors else ""
    return f"{record.figures[name]:.4g}{error}"
