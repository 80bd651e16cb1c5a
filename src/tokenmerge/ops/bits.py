"""The bits of float32 numbers as integers."""

from __future__ import annotations

import torch
from torch import Tensor


def bits(value: Tensor) -> Tensor:
    """The bits of float32 numbers as signed integers: a tensor of any shape → int64 of that shape.

    Exported programs use :func:`bits_by_arithmetic`.

    >>> bits(torch.tensor([0.0, 1.0, -2.0])).tolist()
    [0, 1065353216, -1073741824]
    """
    if torch.compiler.is_exporting():
        return bits_by_arithmetic(value)
    return value.view(torch.int32).to(torch.int64)


def bits_by_arithmetic(value: Tensor) -> Tensor:
    """As :func:`bits`, without a view of another dtype, for which ``torch.onnx`` has no operator.

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
