"""The bits of float32 numbers as integers, in exported programs."""

from __future__ import annotations

import torch
from torch import Tensor


def bits_by_arithmetic(value: Tensor) -> Tensor:
    """Return the bits as :class:`tokenmerge.ops.arithmetic.Arithmetic` does, without a view of another dtype.

    ``torch.onnx`` has no operator for such a view.

    Every operation is exact. Comparing with the powers of two finds the exponent. Dividing by one of them
    leaves a fraction of 24 binary digits, which becomes an integer.

    Args:
        value: float32, finite; −0 counts as 0.
    """
    magnitude = value.abs().to(torch.float64)
    # From the smallest normal number on. Subnormal numbers have its scale, and no 1 before the fraction.
    powers = torch.tensor([2.0**k for k in range(-126, 128)], dtype=torch.float64, device=value.device)
    exponent = (magnitude.unsqueeze(-1) >= powers).sum(dim=-1)
    digits = (magnitude / powers[(exponent - 1).clamp(min=0)] * 2**23).to(torch.int64)
    found = (exponent - (exponent > 0).to(torch.int64)) * 2**23 + digits
    return torch.where(value < 0, found - 2**31, found)
