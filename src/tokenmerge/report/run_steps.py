"""The steps of a run as a table."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tokenmerge.runtime.memory.run_log import in_kinds
from tokenmerge.runtime.memory.step_log import StepRow
from tokenmerge.text_table import Tabled, TextTable

_NOTES = (
    "tokens: of the largest block that merged, before and after; blocks: calls of blocks that merged",
    "change: ‖x_t − x_{t−1}‖ / ‖x_{t−1}‖ of the model's result x; seconds: in the model",
)


@dataclasses.dataclass(frozen=True, repr=False)
class RunSteps(Tabled):
    """The denoising steps of a run: what ran and merged, how much the result changed, and how long it took.

    Iterate over it for the rows. ``print`` shows them as a table.
    """

    rows: tuple[StepRow, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[StepRow]:
        return iter(self.rows)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the rows as plain values, for records."""
        return [dataclasses.asdict(row) for row in self.rows]

    def summary(self) -> str:
        """Return the number of steps of each kind, and their time, in a line."""
        kinds = Counter(row.kind for row in self.rows)
        seconds = sum(row.seconds for row in self.rows)
        return f"{len(self.rows)} steps ({in_kinds(kinds)}), {seconds:.2f} s in the model"

    def _table(self) -> TextTable:
        header = ("step", "kind", "tokens", "blocks", "change", "seconds")
        lines = [
            (
                str(row.step),
                row.kind,
                "" if row.tokens is None else f"{row.tokens} → {row.merged_tokens}",
                str(row.blocks),
                "" if row.change is None else f"{100 * row.change:.1f} %",
                f"{row.seconds:.3f}",
            )
            for row in self.rows
        ]
        return TextTable(self.summary(), [header, *lines], _NOTES)
