"""How exported and traced programs compute what their runtimes cannot compute as PyTorch does.

The hash of :mod:`tokenmerge.ops.pytorch_arithmetic` is computed without numbers above 2²⁴, since some
runtimes, such as OpenVINO's for CPUs, compute int64 in int32. So 32-bit integers are held as limbs of 11, 11
and 10 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tokenmerge.ops.pytorch_arithmetic import FACTORS, STEP_FACTOR, Arithmetic, Draw, avalanche

Limbs = tuple[Tensor, Tensor, Tensor]  # the lowest first

_LIMB = 11  # bits of the lower limbs
_LOW = 0x7FF  # mask of the lower limbs
_HIGH = 0x3FF  # mask of the highest limb


class ExportedArithmetic(Arithmetic):
    """The same results with small integers alone, without views of another dtype or added rows."""

    def bits(self, value: Tensor) -> Tensor:
        """Compute the exponent and the digits, since ``torch.onnx`` has no view of another dtype.

        Every operation is exact. Comparing with the powers of two finds the exponent. Dividing by one of them
        leaves a fraction of 24 binary digits, which becomes an integer. −0 counts as 0.
        """
        magnitude = value.abs().to(torch.float64)
        # From the smallest normal number on. Subnormal numbers have its scale, and no 1 before the fraction.
        powers = torch.tensor([2.0**k for k in range(-126, 128)], dtype=torch.float64, device=value.device)
        exponent = (magnitude.unsqueeze(-1) >= powers).sum(dim=-1)
        digits = (magnitude / powers[(exponent - 1).clamp(min=0)] * 2**23).to(torch.int64)
        found = (exponent - (exponent > 0).to(torch.int64)) * 2**23 + digits
        return torch.where(value < 0, found - 2**31, found)

    def choices(self, size: int, draw: Draw, n: int, device: torch.device | str | None) -> Tensor:
        """Compute ``hash * size >> 32`` from limbs."""
        low, middle, high = _limbs(*draw, n, device)
        carried = (low * size >> _LIMB) + middle * size
        return ((carried >> _LIMB) + high * size) >> (32 - 2 * _LIMB)

    def upper_bits(self, draw: Draw, n: int, device: torch.device | str | None) -> Tensor:
        """Compute the upper bits of the hashes from limbs."""
        low, middle, high = _limbs(*draw, n, device)
        return high * 2**13 + middle * 2**2 + (low >> 9)

    def add_rows(self, total: Tensor, index: Tensor, rows: Tensor) -> Tensor:
        """Add single elements instead of rows.

        ONNX can add rows too (``ScatterND``). But ONNX Runtime does so in several threads, which lose
        summands (microsoft/onnxruntime#18048), and PyTorch's older ONNX export keeps one row for each index.
        """
        of_elements = index.view(-1, *(1,) * (rows.dim() - 1)).expand_as(rows)
        return total.scatter_add(0, of_elements, rows)


def hash_in_limbs(seed: int, step: Tensor, place: Tensor) -> Limbs:
    """Return what :func:`tokenmerge.ops.pytorch_arithmetic.hash_of` returns, in limbs."""
    of_place = _avalanche(_xor(_split(place), _split(avalanche(seed & 0xFFFFFFFF))))
    low, middle, high = _times(_split(step), _split(STEP_FACTOR))
    return _times(of_place, (low | 1, middle, high))


def _avalanche(state: Limbs) -> Limbs:
    """Return what :func:`tokenmerge.ops.pytorch_arithmetic.avalanche` returns, in limbs."""
    for shift, factor in zip((16, 15), FACTORS, strict=True):
        state = _times(_xor_shifted(state, shift), _split(factor))
    return _xor_shifted(state, 16)


def _xor(x: Limbs, y: Limbs) -> Limbs:
    return x[0] ^ y[0], x[1] ^ y[1], x[2] ^ y[2]


_found: Any = WeakTensorKeyDictionary()


def _limbs(seed: int, step: Tensor, n: int, device: torch.device | str | None) -> Limbs:
    """Compute the hashes of n places, once for all blocks of a program."""
    known: dict[tuple[int, int], Limbs] = _found.setdefault(step, {})
    if (seed, n) not in known:
        known[seed, n] = hash_in_limbs(seed, step, torch.arange(n, device=device))
    return known[seed, n]


def _split(x: Any) -> Limbs:
    """Return the limbs of the lower 32 bits of an integer, or of a tensor of integers."""
    return x & _LOW, (x >> _LIMB) & _LOW, (x >> 2 * _LIMB) & _HIGH


def _xor_shifted(x: Limbs, shift: int) -> Limbs:
    """Return ``x ^ (x >> shift)``, with a shift by one limb and some bits."""
    low, middle, high = x
    bits = shift - _LIMB
    down = (middle >> bits) | ((high & ((1 << bits) - 1)) << (_LIMB - bits))
    return low ^ down, middle ^ (high >> bits), high


def _times(x: Limbs, factor: Limbs) -> Limbs:
    """Return ``x * factor`` modulo 2³².

    Each limb of the result is the sum of up to three products of 22 bits.
    """
    low, middle, high = x
    a, b, c = factor
    first = low * a
    second = low * b + middle * a + (first >> _LIMB)
    third = low * c + middle * b + high * a + (second >> _LIMB)
    return first & _LOW, second & _LOW, third & _HIGH
