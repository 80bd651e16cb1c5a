"""Interleaved timing of several variants, with the device synchronised; medians and their spread."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from tokenmerge_tools.bench.memory import peak_memory, reset_peak_memory


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One timed call of one variant.

    ``peak_bytes`` is the peak memory during the call, None if it cannot be read.
    """

    variant: str
    seconds: float
    peak_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Times:
    """Median and spread of repeated timings, in seconds.

    >>> Times.of([1.0, 5.0, 2.0])
    Times(median=2.0, fastest=1.0, slowest=5.0, runs=3)
    """

    median: float
    fastest: float
    slowest: float
    runs: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        """Summarise at least one timing."""
        return cls(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


def interleaved(
    variants: Mapping[str, Callable[[], object]], repeat: int, device: torch.device
) -> Iterator[Measurement]:
    """Time every variant ``repeat`` times, with interleaved calls, and yield each measurement at once.

    The calls are interleaved so that changes in the machine's speed affect all variants alike. Call each
    variant once beforehand, so that compilation and caching are not timed.

    The device is synchronized before each reading of the clock.
    """
    for _ in range(repeat):
        for variant, run in variants.items():
            counts_memory = reset_peak_memory(device)
            synchronize(device)
            start = time.perf_counter()
            run()
            synchronize(device)
            seconds = time.perf_counter() - start
            yield Measurement(variant, seconds, peak_memory(device) if counts_memory else None)


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on ``device`` is done. A CPU has no queue."""
    if device.type == "mps":  # torch.mps has no device argument
        torch.mps.synchronize()
    elif device.type != "cpu":
        getattr(torch, device.type).synchronize(device)
