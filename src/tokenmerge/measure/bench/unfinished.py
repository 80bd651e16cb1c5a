"""Timed calls of unfinished cells, kept on the disk so that a kill loses the call under way and no more."""

from __future__ import annotations

import contextlib
import json
import math
from collections import defaultdict
from pathlib import Path

__all__ = ["TimedCall", "UnfinishedCells"]

TimedCall = tuple[float, int | None]  # seconds, and the peak of memory in bytes where it can be read


class UnfinishedCells:
    """A file beside the results, ``<name>.unfinished``, with a JSON line for each timed call.

    All cells of a setting take turns, so that they finish together in the last round. What they have by then
    would be lost in a kill if it were only in memory. A line that is torn or damaged counts as not timed, and
    a disk that is full costs this protection alone.

    Args:
        results: the results file.
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
        """Keep one more call of a cell."""
        self._calls[name].append(call)
        with contextlib.suppress(OSError), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([name, *call]) + "\n")

    def clear(self) -> None:
        """Forget all calls: the cells have their records."""
        self._calls.clear()
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
