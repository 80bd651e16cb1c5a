"""The hash of :mod:`tokenmerge.ops.arithmetic` in exported programs, where no number may be larger than 2²⁴.

32-bit integers are held as three limbs of 11, 11 and 10 bits, because some runtimes for exported models, such
as OpenVINO's for CPUs, compute int64 in int32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tokenmerge.ops.arithmetic import FACTORS

Limbs = tuple[Tensor, Tensor, Tensor]  # the lowest first

_LIMB, _LOW, _HIGH = 11, 0x7FF, 0x3FF  # bits of the lower limbs, and masks of the lower and the highest ones


def hash_in_limbs(seed: int, step: Tensor, place: Tensor) -> Limbs:
    """As :func:`tokenmerge.ops.arithmetic.hash_of`, in limbs."""
    state: Any = _split(seed)
    for counter in (step, place):
        state = tuple(limb ^ other for limb, other in zip(state, _split(counter), strict=True))
        for shift, factor in zip((16, 15), FACTORS, strict=True):
            state = _times(_xor_shifted(state, shift), factor)
        state = _xor_shifted(state, 16)
    limbs: Limbs = state
    return limbs


def remainders(size: int, seed: int, step: Tensor, n: int, device: torch.device | str | None) -> Tensor:
    """``[n]``: the hashes of n places modulo ``size``."""
    low, middle, high = _limbs(seed, step, n, device)
    return (high * (2 ** (2 * _LIMB) % size) + middle * (2**_LIMB % size) + low) % size


def upper_bits(seed: int, step: Tensor, n: int, device: torch.device | str | None) -> Tensor:
    """``[n]``: the upper 23 bits of the hashes of n places, as integers."""
    low, middle, high = _limbs(seed, step, n, device)
    return high * 2**13 + middle * 2**2 + (low >> 9)


_found: Any = WeakTensorKeyDictionary()


def _limbs(seed: int, step: Tensor, n: int, device: torch.device | str | None) -> Limbs:
    """Compute the hashes of n places, once for all blocks of a program."""
    known = _found.setdefault(step, {})
    if (seed, n) not in known:
        known[seed, n] = hash_in_limbs(seed, step, torch.arange(n, device=device))
    limbs: Limbs = known[seed, n]
    return limbs


def _split(x: Any) -> Any:
    """Return the limbs of the lower 32 bits of an integer, or of a tensor of integers."""
    return x & _LOW, (x >> _LIMB) & _LOW, (x >> 2 * _LIMB) & _HIGH


def _xor_shifted(x: Limbs, shift: int) -> Limbs:
    """``x ^ (x >> shift)``, with a shift by one limb and some bits."""
    low, middle, high = x
    bits = shift - _LIMB
    down = (middle >> bits) | ((high & ((1 << bits) - 1)) << (_LIMB - bits))
    return low ^ down, middle ^ (high >> bits), high


def _times(x: Limbs, factor: int) -> Limbs:
    """``x * factor`` modulo 2³²: each limb of the result is the sum of up to three products of 22 bits."""
    low, middle, high = x
    a, b, c = factor & _LOW, (factor >> _LIMB) & _LOW, factor >> 2 * _LIMB
    first = low * a
    second = low * b + middle * a + (first >> _LIMB)
    third = low * c + middle * b + high * a + (second >> _LIMB)
    return first & _LOW, second & _LOW, third & _HIGH
