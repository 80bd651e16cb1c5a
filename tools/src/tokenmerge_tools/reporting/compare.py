"""Compares two sets of results cell by cell, to find what became slower."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable

from tokenmerge.errors import ConfigError, shown
from tokenmerge_tools.records.kinds import CellRecord
from tokenmerge_tools.reporting.tables import setting_name, what_of

# Conditions that may differ between two measurements of the same cell.
_OF_A_RUN = ("environment", "commit", "rounds", "warmup")


@dataclasses.dataclass(frozen=True)
class Change:
    """One cell that is in both results: median seconds, None if it was not timed, and the second status."""

    name: str
    before: float | None
    after: float | None
    status: str

    @property
    def ratio(self) -> float | None:
        """t_after / t_before, above 1 if the cell became slower; None if either is missing."""
        return None if self.before is None or self.after is None else self.after / self.before

    def slower(self, tolerance: float) -> bool:
        """Return whether the cell takes more than ``1 + tolerance`` times as long, or no longer runs."""
        if self.before is not None and self.after is None:
            return True
        return self.ratio is not None and self.ratio > 1 + tolerance

    def __str__(self) -> str:
        if self.before is None:
            return f"{self.name}: " + (
                "not timed in either" if self.after is None else f"new, {self.after:.4g} s"
            )
        if self.ratio is None:
            return f"{self.name}: {self.before:.4g} s → {self.status}"
        percent = 100 * (self.ratio - 1)
        word = "slower" if percent > 0 else "faster"
        times = f"{self.before:.4g} s → {self.after:.4g} s"
        return f"{self.name}: {times}, ratio {self.ratio:.3f} ({abs(percent):.1f} % {word})"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The cells of two sets of results. Cells that are only in one of them are listed by name."""

    changes: tuple[Change, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]

    def slower(self, tolerance: float) -> list[Change]:
        """Return the cells that became slower by more than ``tolerance``, a fraction ≥ 0."""
        return [change for change in self.changes if change.slower(tolerance)]


def compare(before: Iterable[CellRecord], after: Iterable[CellRecord]) -> Comparison:
    """Match cells with the same conditions, apart from versions, commit and number of calls."""
    first, second = ({_same(cell): cell for cell in cells} for cells in (before, after))
    both = [(first[key], cell) for key, cell in second.items() if key in first]
    if not both:
        raise ConfigError(
            "compare: no cell is in both results; compare runs of the same models, sizes and variants on the "
            "same machine"
        )
    return Comparison(
        tuple(Change(_name(cell), old.median, cell.median, cell.status) for old, cell in both),
        tuple(_name(cell) for key, cell in first.items() if key not in second),
        tuple(_name(cell) for key, cell in second.items() if key not in first),
    )


def parse_tolerance(text: str) -> float:
    """Read a percentage such as ``5%`` as a fraction.

    >>> parse_tolerance("5%")
    0.05
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*", text)
    if found is None:
        raise ConfigError(f"fail-if-slower: expected a percentage such as 5%, got {shown(text)}")
    return float(found[1]) / 100


def _same(cell: CellRecord) -> str:
    conditions = {name: value for name, value in cell.conditions.items() if name not in _OF_A_RUN}
    return json.dumps(conditions, sort_keys=True)


def _name(cell: CellRecord) -> str:
    return f"{setting_name(cell.conditions)}, {what_of(cell)}"
