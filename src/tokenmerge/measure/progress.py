"""How far a run is."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far one part of a run is.

    A part is what is being done, such as ``"dense"`` or ``"drawing"``. The total includes the warm-up, but no
    pictures of earlier runs.
    """

    part: str
    done: int
    total: int
