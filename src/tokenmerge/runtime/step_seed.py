"""The number of a denoising step that random draws depend on."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from tokenmerge.runtime.scheduler import needs_sync

__all__ = ["StepSeed", "bits_by_arithmetic", "same_step"]


class StepSeed:
    """Makes an integer for each denoising step: the bits of its timestep as a float32.

    The timestep is taken and not a counter. It is the same for both halves of classifier-free guidance, for
    every batch size, and when gradient checkpointing runs a block again. In training each sample may have a
    timestep of its own, and image-to-video models give one to each token; the highest counts for all.
    """

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[Tensor], int, Tensor] | None = None

    def of(self, timestep: Tensor | float, device: torch.device) -> Tensor:
        """The number of a step, int64. The same timestep tensor gives the same result tensor again."""
        if not isinstance(timestep, Tensor) or not needs_sync(timestep):
            return _bits(timestep, device)
        if torch.compiler.is_compiling() or timestep.is_inference():
            return _bits(timestep, device)  # nothing tells whether its value has changed
        if self._last is not None:
            last, version, number = self._last
            if last() is timestep and version == timestep._version and number.device == device:
                return number
        number = _bits(timestep, device)
        self._last = weakref.ref(timestep), timestep._version, number
        return number


def same_step(step: Tensor, other: Tensor) -> bool:
    """Whether two numbers of steps are equal. The same tensor is not compared, which would synchronise."""
    return step is other or torch.equal(step, other)


def _bits(timestep: Tensor | float, device: torch.device) -> Tensor:
    latest = torch.as_tensor(timestep, device=device, dtype=torch.float32).max()
    if torch.compiler.is_exporting():
        return bits_by_arithmetic(latest)
    return latest.view(torch.int32).to(torch.int64)


def bits_by_arithmetic(value: Tensor) -> Tensor:
    """The bits of a float32 as a signed integer, without a bit cast, which ONNX does not have.

    Every operation is exact: comparing with powers of two finds the exponent, and scaling by one of them
    moves the fraction into an integer. It equals ``value.view(torch.int32)`` for all finite values but −0,
    which gives the 0 of +0.

    Args:
        value: float32 of no dimensions, finite.

    Returns:
        int64 of no dimensions.
    """
    magnitude = value.abs().to(torch.float64)
    # 2^-126 is the smallest normal number; what is below it has the same scale and no leading one.
    powers = torch.tensor([2.0**k for k in range(-126, 128)], dtype=torch.float64, device=value.device)
    exponent = (magnitude >= powers).sum()
    scale = powers[(exponent - 1).clamp(min=0)]
    fraction = (magnitude / scale * 2**23).to(torch.int64) - (exponent > 0).to(torch.int64) * 2**23
    bits = exponent * 2**23 + fraction
    return torch.where(value < 0, bits - 2**31, bits)
