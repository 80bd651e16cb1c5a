"""The machine that measures: versions, devices, attention back-ends, the source's commit, memory at hand."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import tokenmerge
import tokenmerge_tools

_PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "tomesd", "DeepCache", "cache-dit")
_ATTENTION_PACKAGES = {"xformers": "xformers", "flash-attn": "flash_attn", "sageattention": "sageattention"}
_SOURCES = tuple(Path(package.__path__[0]) for package in (tokenmerge, tokenmerge_tools))
# Bytes left free for the rest of the machine.
RESERVE = 256 * 2**20
_MEMINFO, _STATUS, _OWN_GROUPS = map(Path, ("/proc/meminfo", "/proc/self/status", "/proc/self/cgroup"))
_CGROUP = Path("/sys/fs/cgroup")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def environment() -> dict[str, Any]:
    """Describe everything about this machine that a measurement depends on, in JSON-compatible values.

    Versions of optional libraries are read from their metadata, without importing the libraries.

    >>> sorted(environment())
    ['attention', 'cpu', 'devices', 'os', 'threads', 'versions']
    """
    return {
        "versions": versions(),
        "os": platform.platform(),
        "cpu": {
            "model": _cpu_model(),
            "cores": os.cpu_count(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
        },
        "threads": torch.get_num_threads(),
        "devices": devices(),
        "attention": attention_backends(),
    }


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that matter; None if one is not installed."""
    return {
        "python": platform.python_version(),
        "tokenmerge": tokenmerge.__version__,
        **{package: version_of(package) for package in _PACKAGES},
    }


def devices() -> list[dict[str, Any]]:
    """Return the devices that torch can use here, with the dtypes in which each can multiply matrices."""
    found: list[tuple[torch.device, str, int | None]] = [(torch.device("cpu"), _cpu_model(), None)]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append((torch.device("cuda", index), properties.name, properties.total_memory))
    if torch.backends.mps.is_available():
        found.append((torch.device("mps"), "Apple GPU", None))
    return [
        {
            "device": str(device),
            "name": name,
            "memory_bytes": memory,
            "dtypes": [_short(dtype) for dtype in _DTYPES if _multiplies(dtype, device)],
        }
        for device, name, memory in found
    ]


def attention_backends() -> dict[str, str | None]:
    """Return the attention implementations by name: kernels or version, or None if not installed."""
    return {
        "sdpa": ", ".join(_sdpa_kernels()),
        **{name: version_of(package) for name, package in _ATTENTION_PACKAGES.items()},
    }


def _sdpa_kernels() -> list[str]:
    """Return the kernels that ``scaled_dot_product_attention`` may choose from."""
    if not torch.cuda.is_available():
        return ["flash (CPU)", "math"]
    cuda = torch.backends.cuda
    enabled = {
        "flash": cuda.is_flash_attention_available() and cuda.flash_sdp_enabled(),
        "memory-efficient": cuda.mem_efficient_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }
    return [kernel for kernel, on in enabled.items() if on]


def _multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    try:
        torch.ones(2, 2, dtype=dtype, device=device) @ torch.ones(2, 2, dtype=dtype, device=device)
    except RuntimeError:
        return False
    return True


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def version_of(package: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return platform.processor() or platform.machine()


def source_commit() -> str | None:
    """Return the last commit that changed the library or the tools; None outside a git checkout.

    If there are local changes or untracked files, ``+changes-HASH`` follows it. Commits that change only
    other files are skipped, because they cannot change a measurement.
    """
    if shutil.which("git") is None:
        return None
    commit = _git("log", "-1", "--format=%h")
    if not commit:
        return None
    # For a binary file, git diff prints the hash of its content.
    changes = _git("diff", "HEAD", "--no-ext-diff", "--no-color")
    unknown = _git("ls-files", "--others", "--exclude-standard", "-z").split("\0")
    found = hashlib.sha256(changes.encode())
    for name in filter(None, unknown):
        found.update(name.encode() + hashlib.sha256((_SOURCES[0] / name).read_bytes()).digest())
    return f"{commit}+changes-{found.hexdigest()[:8]}" if changes or any(unknown) else commit


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_SOURCES[0]), *arguments, "--", *map(str, _SOURCES)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    return done.stdout.strip()


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
    """Return the bytes that this process can still allocate in its control groups; None if unknown."""
    try:
        available = _number(_MEMINFO, "MemAvailable:") * 1024
    except (OSError, StopIteration):
        return None
    return max(min([available, *_left_in_groups()]), 0)


def _left_in_groups() -> Iterator[int]:
    """Yield the bytes left in the control group (version 2) of this process and in each of its parents."""
    try:
        own = next(line for line in _OWN_GROUPS.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return
    path = _CGROUP / own.removeprefix("0::").strip("/")
    for group in (path, *path.parents):
        # In a container, the path may be the one outside of it. Then only the root exists here.
        if group.is_relative_to(_CGROUP):
            with contextlib.suppress(OSError, ValueError, StopIteration):  # it may have no limit
                highest, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
                yield highest - used + _number(group / "memory.stat", "inactive_file ")


def _number(file: Path, name: str) -> int:
    return int(next(line for line in file.read_text().splitlines() if line.startswith(name)).split()[1])
