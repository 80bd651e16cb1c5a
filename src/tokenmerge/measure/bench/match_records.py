"""Find the cell of a benchmark that timed the variant that pictures were drawn with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tokenmerge.measure.bench.records import CellRecord

__all__ = ["cell_of_pictures"]

_SHARED = ("model", "width", "height", "steps", "scheduler", "guidance", "dtype", "attention")


def cell_of_pictures(
    label: str, conditions: Mapping[str, Any], cells: Iterable[CellRecord]
) -> CellRecord | None:
    """The cell of a variant under the conditions that its pictures were drawn under; None if there is none.

    Of several, the whole pipeline goes before the denoiser alone, then the smaller batch, then the newer one.

    Args:
        label: the variant with its settings.
        conditions: of the pictures, by the names that those of a cell have; ``device`` is its type alone.
            What is not among them may be anything.
        cells: of which to choose.
    """

    def fits(cell: CellRecord) -> bool:
        own = cell.conditions
        # One call of the denoiser is the same with every scheduler.
        ignored = "scheduler" if own["scope"] == "denoiser" else ""
        return (
            cell.label == label
            and not own["compile"]
            and all(own[name] == conditions.get(name, own[name]) for name in _SHARED if name != ignored)
            and conditions.get("device") in (None, own["device"].partition(":")[0])
        )

    found = (cell for cell in cells if fits(cell))
    return max(
        found,
        key=lambda cell: (cell.conditions["scope"] == "pipeline", -cell.conditions["batch"], cell.finished),
        default=None,
    )
