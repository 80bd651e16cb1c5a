"""Interleaved timing of several variants, with the device synchronised, and the peak memory of each call."""

from __future__ import annotations

import ctypes
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One timed call of one variant.

    ``peak_bytes`` is the peak memory during the call, or None if it cannot be read. On a CPU,
    ``work_seconds`` is the time of the processor, which other programs do not affect. On other devices it
    equals ``seconds``.
    """

    variant: str
    seconds: float
    peak_bytes: int | None
    work_seconds: float


def interleaved(
    variants: Mapping[str, Callable[[], object]], repeat: int, device: torch.device
) -> Iterator[Measurement]:
    """Time every variant ``repeat`` times, with interleaved calls, and yield each measurement at once.

    The calls are interleaved so that changes in the machine's speed affect all variants alike. Call each
    variant once beforehand, so that compilation and caching are not timed.
    """
    for _ in range(repeat):
        for variant, run in variants.items():
            counts_memory = reset_peak_memory(device)
            synchronize(device)
            start = time.perf_counter()
            began = time.process_time()
            run()
            synchronize(device)
            seconds = time.perf_counter() - start
            busy = time.process_time() - began
            peak = peak_memory(device) if counts_memory else None
            yield Measurement(variant, seconds, peak, busy if device.type == "cpu" else seconds)


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on ``device`` is done. A CPU has no queue."""
    if device.type == "mps":  # torch.mps has no device argument
        torch.mps.synchronize()
    elif device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def peak_memory_meaning(device: torch.device) -> str:
    """Describe what :func:`peak_memory` measures on ``device``."""
    if device.type == "cuda":
        return "peak of the tensors that PyTorch held on the GPU, weights included"
    if device.type == "cpu" and sys.platform == "linux":
        return "peak resident memory of the whole process, weights and Python included"
    return f"not available on {device.type} under {sys.platform}"


def reset_peak_memory(device: torch.device) -> bool:
    """Reset the peak that :func:`peak_memory` reads. Return False if the device does not support it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    if device.type == "cpu" and sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)  # return freed memory
        try:
            _CLEAR_REFS.write_text("5")  # this resets the peak
        except OSError:  # some sandboxes forbid it
            return False
        return True
    return False


def peak_memory(device: torch.device) -> int:
    """Return the peak memory on ``device`` in bytes since :func:`reset_peak_memory` returned True."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(peak.split()[1]) * 1024
