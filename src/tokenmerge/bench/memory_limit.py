"""Running out of memory as an error that a cell can report, instead of a process that the kernel kills."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = ["RESERVE", "available_memory", "memory_limit"]

# What the rest of the machine may come to need meanwhile.
RESERVE = 256 * 2**20
_MEMINFO, _STATUS, _CGROUP = Path("/proc/meminfo"), Path("/proc/self/status"), Path("/sys/fs/cgroup")


@contextlib.contextmanager
def memory_limit(device: torch.device) -> Iterator[None]:
    """While the context lasts, let allocations beyond the memory at hand fail, where a CPU runs the model.

    Linux grants more than it has and kills the process that uses it; the run would end without a word, and
    again at the same cell when it is continued. A no-op on other systems and devices.
    """
    available = available_memory() if device.type == "cpu" and sys.platform == "linux" else None
    if available is None:
        yield
        return
    import resource

    held = _kilobytes(_STATUS, "VmData:") * 1024
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = held + max(available - RESERVE, 0)
    if before[0] != resource.RLIM_INFINITY:
        limit = min(limit, before[0])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def available_memory() -> int | None:
    """Bytes that this process can still take, within its control group; None where that is not known."""
    try:
        available = _kilobytes(_MEMINFO, "MemAvailable:") * 1024
    except (OSError, StopIteration):
        return None
    try:
        highest = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if highest == "max" else min(available, max(int(highest) - used, 0))


def _kilobytes(file: Path, name: str) -> int:
    return int(next(line for line in file.read_text().splitlines() if line.startswith(name)).split()[1])
