"""Selects the newest record among those that would have the same name in a report."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from tokenmerge_tools.records.kinds import CellRecord
from tokenmerge_tools.reporting.quality import QualityRecord
from tokenmerge_tools.reporting.quality_tables import where_drawn
from tokenmerge_tools.reporting.tables import what_of, where_of

R = TypeVar("R", CellRecord, QualityRecord)


def newest_cells(cells: Iterable[CellRecord]) -> tuple[list[CellRecord], list[str]]:
    """Select the last cell among those that would have the same name in the same table.

    Returns:
        The selected cells, and a note on the conditions that differ if any cell is left out.
    """
    by_age = sorted(cells, key=lambda cell: cell.finished)
    return _last(by_age, lambda cell: (*where_of(cell), what_of(cell)), "cells")


def newest_figures(records: Iterable[QualityRecord]) -> tuple[list[QualityRecord], list[str]]:
    """Select the last quality record among those with the same name in the same table, as for cells."""
    return _last(
        sorted(records, key=lambda record: record.finished),
        lambda record: (*where_drawn(record), record.label, record.category),
        "quality records",
    )


def _last(by_age: Sequence[R], name: Callable[[R], Hashable], what: str) -> tuple[list[R], list[str]]:
    found: dict[Hashable, R] = {}
    differs: set[str] = set()
    for record in by_age:
        earlier = found.get(name(record))
        if earlier is not None:
            before = earlier.conditions
            differs |= {key for key, value in record.conditions.items() if value != before.get(key)}
        found[name(record)] = record
    older = len(by_age) - len(found)
    said = f"{older} older {what} are left out; newer ones differ only in {', '.join(sorted(differs))}"
    return list(found.values()), [said] if older else []
