"""Where fewer steps of the unchanged model can be as close as the default method, at equal operations."""

from __future__ import annotations

# The largest number of steps where they were so in at least a quarter of the images of one of the bundled
# models, with the guidance of its pipeline, by benchmarks/by_steps_cpu.jsonl.
MOST = 15


def can_be_as_close(steps: int) -> bool:
    """Return whether fewer steps can be as close as the default method in a generation of so many steps.

    >>> can_be_as_close(8), can_be_as_close(30)
    (True, False)
    """
    return steps <= MOST
