"""Finds the benchmark cell that timed the variant of an evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tokenmerge_tools.records.kinds import CellRecord

_SHARED = ("model", "width", "height", "steps", "scheduler", "guidance", "dtype", "attention")


def cell_of_pictures(
    label: str, conditions: Mapping[str, Any], cells: Iterable[CellRecord]
) -> CellRecord | None:
    """Find the cell that timed a variant under the conditions of its images; None if there is none.

    If several cells fit, a whole pipeline is preferred, then the smaller batch, then the newer cell.

    The conditions are those of the images, named as in a cell. ``device`` is only the type of the device. A
    condition that is missing matches any value.
    """

    def fits(cell: CellRecord) -> bool:
        own = cell.conditions
        # The scheduler does not affect the time of one call of the denoiser.
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
