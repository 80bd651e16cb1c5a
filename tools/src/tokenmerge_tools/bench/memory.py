"""Peak memory of a run, on devices that report it."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK_RSS = "5"


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
        _return_freed_memory()
        try:
            _CLEAR_REFS.write_text(_RESET_PEAK_RSS)
        except OSError:  # some sandboxes forbid it
            return False
        return True
    return False


def peak_memory(device: torch.device) -> int:
    """Peak memory on ``device`` in bytes since :func:`reset_peak_memory`, which must have returned True."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(peak.split()[1]) * 1024


def _return_freed_memory() -> None:
    """Return freed heap memory to the system, so that it does not count in the next run."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
