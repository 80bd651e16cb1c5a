"""The number of a denoising step that random draws depend on."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from tokenmerge.ops.arithmetic import arithmetic
from tokenmerge.runtime.steps.scheduler import needs_sync


class StepSeed:
    """Makes an integer for each denoising step: the bits of its timestep as a float32.

    The timestep is taken and not a counter. It is the same for both halves of classifier-free guidance, for
    every batch size, and when gradient checkpointing runs a block again. In training each sample may have a
    timestep of its own, and image-to-video models give one to each token; the highest counts for all.
    """

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[Tensor], int, Tensor] | None = None
        self._last_read: tuple[int, Tensor] | None = None

    def of(self, timestep: Tensor | float, device: torch.device) -> Tensor:
        """Return the number of a step, int64, on a device.

        The same timestep tensor gives the same result tensor again. On a device, so does the same timestep on
        the CPU.
        """
        if not isinstance(timestep, Tensor) or not needs_sync(timestep):
            if torch.compiler.is_compiling() or device.type == "cpu":
                return _bits(timestep, device)
            return self._read(int(_bits(timestep, torch.device("cpu"))), device)
        if torch.compiler.is_compiling() or timestep.is_inference():
            return _bits(timestep, device)  # its value may have changed unseen
        if self._last is not None:
            last, version, number = self._last
            if last() is timestep and version == timestep._version and number.device == device:
                return number
        number = _bits(timestep, device)
        self._last = weakref.ref(timestep), timestep._version, number
        return number

    def _read(self, value: int, device: torch.device) -> Tensor:
        """Return a number that is known on the CPU. Copying it to the device would wait for the device."""
        if self._last_read is not None:
            last, number = self._last_read
            if last == value and number.device == device:
                return number
        number = torch.full((), value, device=device)
        self._last_read = value, number
        return number


def same_step(step: Tensor, other: Tensor) -> bool:
    """Return whether two numbers of steps are equal; a tensor equals itself without being read."""
    return step is other or torch.equal(step, other)


def _bits(timestep: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(timestep, Tensor) and timestep.ndim and not any(timestep.stride()):
        timestep = timestep[(0,) * timestep.ndim]  # pipelines expand one number
    latest = torch.as_tensor(timestep, device=device, dtype=torch.float32)
    return arithmetic().bits(latest.max() if latest.numel() > 1 else latest.view(()))
