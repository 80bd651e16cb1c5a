"""Turns a lack of memory into an error that a cell can report, before the kernel kills the process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

# Bytes left free for the rest of the machine.
RESERVE = 256 * 2**20
_MEMINFO, _STATUS, _OWN_GROUPS = map(Path, ("/proc/meminfo", "/proc/self/status", "/proc/self/cgroup"))
_CGROUP = Path("/sys/fs/cgroup")
# Names in a control group of version 2 and 1: its limit, its usage, and the reclaimable cache in that usage.
_GROUP_FILES = ("memory.max", "memory.current", "inactive_file")
_GROUP_FILES_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@contextlib.contextmanager
def memory_limit(device: torch.device) -> Iterator[None]:
    """Make allocations beyond the available memory fail within the context. Only for the CPU, on Linux.

    Linux grants more memory than it has, and kills a process that uses too much. Without the limit, the
    benchmark would end without a message, and end at the same cell again when it is continued.
    """
    available = available_memory() if device.type == "cpu" and sys.platform == "linux" else None
    if available is None:
        yield
        return
    import resource

    held = _number(_STATUS, "VmData:") * 1024
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
    """Bytes that this process can still allocate, within its control groups; None if that is unknown."""
    try:
        available = _number(_MEMINFO, "MemAvailable:") * 1024
    except (OSError, StopIteration):
        return None
    return max(min([available, *_left_in_groups()]), 0)


def _left_in_groups() -> Iterator[int]:
    """Bytes left in the control group of this process and in each of its parents."""
    try:
        groups = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _CGROUP / "memory" if controllers else _CGROUP
        own = root / path.strip("/")
        for group in (own, *own.parents):
            # In a container, the path may be the one outside of it. Then only the root exists here.
            if group.is_relative_to(root):
                with contextlib.suppress(OSError, ValueError, StopIteration):
                    yield _left_in(group, *(_GROUP_FILES_V1 if controllers else _GROUP_FILES))


def _left_in(group: Path, limit: str, usage: str, cache: str) -> int:
    """Bytes left in one group. Raises a ValueError if the group has no limit."""
    highest, used = int((group / limit).read_text()), int((group / usage).read_text())
    return highest - used + _number(group / "memory.stat", f"{cache} ")


def _number(file: Path, name: str) -> int:
    """The number in the first line that starts with ``name``."""
    return int(next(line for line in file.read_text().splitlines() if line.startswith(name)).split()[1])
