"""The progress of a run."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress of one part of a run.

    ``part`` names this part, such as ``"dense"`` or ``"drawing"``. ``total`` includes the warm-up, but no
    pictures of earlier runs.
    """

    part: str
    done: int
    total: int
