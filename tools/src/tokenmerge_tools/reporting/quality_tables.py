"""Tables of quality metrics, one for each set of pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenmerge_tools.records.kinds import LOWER_IS_CLOSER, QualityRecord, key_of, metric_names
from tokenmerge_tools.reporting.tables import Table, TableRow, attention_name, once, sampling_name

# Conditions that the pictures of one table have in common, in addition to the model and the size.
_SHARED = ("steps", "scheduler", "guidance", "dtype", "device", "attention", "prompts", "seeds")

# Metrics that are neither higher nor lower for closer pictures.
_AIMS = {"motion": " → 1"}

_MOTION = (
    "videos: metrics of pictures are means over the frames; motion: 0 for a frozen video, 1 for as much "
    "motion as dense; motion-error: 0 for the same motion as dense"
)
_COUNTED = "counted: dense operations over those of the variant; those of other packages are counted in runs"
_ERRORS = "± standard error of the mean over the pictures"
# What a picture costs: the header, and how it is written.
_COSTS: dict[str, tuple[str, Callable[[float], str]]] = {
    "counted": ("counted", lambda speedup: f"{speedup:.2f}×"),
    "seconds": ("seconds", lambda seconds: f"{seconds:.3g}"),
    "peak_bytes": ("peak GiB", lambda size: f"{size / 2**30:.2f}"),
}
_SPEEDUP = "speed-up: t_dense / t per picture, median and quartiles"


def where_drawn(record: QualityRecord) -> tuple[str, int, int, str]:
    """Return what the records of one table have in common."""
    shared = key_of({name: record.conditions.get(name) for name in (*_SHARED, "frames")})
    return record.model, record.width, record.height, shared


def quality_name(record: QualityRecord) -> str:
    """Return the title of the record's table."""
    parts = [record.model, f"{record.width} × {record.height}"]
    if (frames := record.conditions.get("frames")) is not None:
        parts.append(f"{frames} frames")
    if set(_SHARED) <= set(record.conditions):
        c = record.conditions
        count, seeds = c["prompts"]["count"], c["seeds"]
        parts += [
            sampling_name(c),
            f"{c['dtype']} on {c['device']}",
            attention_name(c["attention"]),
            f"{count} prompt{'s' if count > 1 else ''}",
            f"seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"seed {seeds[0]}",
        ]
    return ", ".join(parts)


def quality_tables(records: Sequence[QualityRecord]) -> list[Table]:
    """Make one table for each set of pictures, with a row for each variant and category."""
    return [
        _table([record for record in records if where_drawn(record) == where])
        for where in dict.fromkeys(map(where_drawn, records))
    ]


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
    header = ("variant", *["category"] * by_category, "pictures", *["speed-up"] * timed, *names, *arrows)
    notes = [
        "↑ higher, ↓ lower is better; psnr in dB",
        *[_SPEEDUP] * timed,
        *[_COUNTED] * ("counted" in costs),
        *[_ERRORS] * any(record.errors for record in records),
        *[_MOTION] * ("motion" in metrics),
    ]
    notes += once((note for record in records for note in record.notes), [r.label for r in records])
    return Table(
        quality_name(records[0]), header, tuple(map(row, records)), tuple(notes), words=1 + by_category
    )


def _speedup(record: QualityRecord) -> str:
    if record.speedup is None or record.speedup_quartiles is None:
        return ""
    low, high = record.speedup_quartiles
    return f"{record.speedup:.2f}× ({low:.2f} to {high:.2f})"


def _figure(record: QualityRecord, name: str) -> str:
    # If all pictures equal dense, their PSNR is infinite and not recorded. Their SSIM is 1 up to rounding.
    if name == "psnr" and name not in record.figures and record.figures.get("ssim", 0) > 1 - 1e-6:
        return "identical"
    if name not in record.figures:
        return ""
    error = f" ± {record.errors[name]:.2g}" if name in record.errors else ""
    return f"{record.figures[name]:.4g}{error}"
