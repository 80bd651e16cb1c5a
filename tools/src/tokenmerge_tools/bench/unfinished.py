"""Timed calls of unfinished cells, saved to disk so that a killed run loses only its current call."""

from __future__ import annotations

import contextlib
import json
import math
from collections import defaultdict
from pathlib import Path

TimedCall = tuple[float, int | None]  # seconds, and peak memory in bytes or None


class UnfinishedCells:
    """The file ``<name>.unfinished`` beside the results, with a line of JSON for each timed call.

    All cells of a setting finish in the last round, because their calls are interleaved. Until then, their
    timings would be lost if the run was killed. Incomplete or damaged lines are ignored. If the disk is full,
    timings are kept only in memory.
    """

    def __init__(self, results: Path) -> None:
        self.path = results.with_name(f"{results.name}.unfinished")
        self._calls: dict[str, list[TimedCall]] = defaultdict(list)
        with contextlib.suppress(OSError):
            for line in self.path.read_bytes().splitlines():
                with contextlib.suppress(ValueError, TypeError, RecursionError):
                    name, seconds, peak = json.loads(line)
                    if math.isfinite(seconds) and seconds > 0 and (peak is None or type(peak) is int):
                        self._calls[name].append((float(seconds), peak))

    def calls(self, name: str) -> tuple[TimedCall, ...]:
        """The timed calls of a cell, in the order in which they ran."""
        return tuple(self._calls.get(name, ()))

    def add(self, name: str, call: TimedCall) -> None:
        """Save one more call of a cell."""
        self._calls[name].append(call)
        with contextlib.suppress(OSError), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([name, *call]) + "\n")

    def clear(self) -> None:
        """Delete all calls, once the cells have their records."""
        self._calls.clear()
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
