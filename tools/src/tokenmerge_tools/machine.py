"""The machine that measures: versions, devices, attention back-ends, and the source's commit."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import tokenmerge
import tokenmerge_tools

_PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "tomesd", "DeepCache", "cache-dit")
_ATTENTION_PACKAGES = {"xformers": "xformers", "flash-attn": "flash_attn", "sageattention": "sageattention"}
_SOURCES = tuple(Path(package.__path__[0]) for package in (tokenmerge, tokenmerge_tools))


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
        "attention": {
            "sdpa": ", ".join(_sdpa_kernels()),
            **{name: version_of(package) for name, package in _ATTENTION_PACKAGES.items()},
        },
    }


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that matter, or None for a missing package."""
    return {
        "python": platform.python_version(),
        "tokenmerge": tokenmerge.__version__,
        **{package: version_of(package) for package in _PACKAGES},
    }


def devices() -> list[dict[str, Any]]:
    """Return the devices that torch can use here."""
    found: list[tuple[str, str, int | None]] = [("cpu", _cpu_model(), None)]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append((f"cuda:{index}", properties.name, properties.total_memory))
    if torch.backends.mps.is_available():
        found.append(("mps", "Apple GPU", None))
    return [dict(zip(("device", "name", "memory_bytes"), one, strict=True)) for one in found]


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


def version_of(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
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
    """Return the last commit that changed the library or the tools, or None outside a git checkout.

    If there are local changes or untracked files, ``+changes-HASH`` is appended. Commits that change only
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
