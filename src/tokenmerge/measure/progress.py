"""How far a run is."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far one part of a run is.

    Args:
        part: what is being done, such as ``"dense"`` or ``"drawing"``.
        done: steps or pictures that are done.
        total: how many there will be, warm-up included; pictures of earlier runs do not count.
    """

    part: str
    done: int
    total: int
