"""Pseudo-random numbers that depend on a seed, the denoising step and a place, and on nothing else.

They need no generator, are the same for all images of a batch, and can be recomputed in a backward pass. Each
is a 32-bit integer: the counters go one after another through the avalanche function "lowbias32" (C. Wellons,
public domain). If one input bit changes, each output bit changes with probability 1/2.

In an exported program, 32-bit integers are held as three limbs of 11, 11 and 10 bits, and no number is larger
than 2²⁴: some programs that run exported models, such as OpenVINO's for CPUs, compute int64 in int32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Draw = tuple[int, Tensor]  # a seed, and the number of a step as an integer tensor of no dimensions
Limbs = tuple[Tensor, Tensor, Tensor]  # the lowest first

_MASK32 = 0xFFFFFFFF
_FACTORS = (0x7FEB352D, 0x846CA68B)
_LIMB, _LOW, _HIGH = 11, 0x7FF, 0x3FF  # bits of the lower limbs, and masks of the lower and the highest ones


def below(size: int, draw: Draw, n: int, device: torch.device | str | None = None) -> Tensor:
    """``[n]`` pseudo-random integers, 0 ≤ x < size.

    >>> below(4, (0, torch.tensor(7)), 8).tolist()
    [0, 2, 2, 2, 0, 1, 2, 2]
    """
    if torch.compiler.is_exporting():
        low, middle, high = _limbs(*draw, n, device)
        return (high * (2 ** (2 * _LIMB) % size) + middle * (2**_LIMB % size) + low) % size
    return hash_of(*draw, torch.arange(n, device=device)) % size


def uniform_noise(draw: Draw, n: int, device: torch.device | str | None = None) -> Tensor:
    """``[n]`` pseudo-random float32 numbers, 0 < x < 1.

    >>> uniform_noise((0, torch.tensor(7)), 1000).mean().sub(0.5).abs().item() < 0.05
    True
    """
    # The upper 23 bits plus one half: float32 represents these numbers exactly.
    if torch.compiler.is_exporting():
        low, middle, high = _limbs(*draw, n, device)
        upper = high * 2**13 + middle * 2**2 + (low >> 9)
    else:
        upper = hash_of(*draw, torch.arange(n, device=device)) >> 9
    return (upper.to(torch.float32) + 0.5) * 2.0**-23


def hash_of(seed: int, step: Tensor, place: Tensor) -> Tensor:
    """Uniform 32-bit integers from three counters, of the shape of ``place``."""
    state = torch.full_like(place, seed & _MASK32)
    for counter in (step, place):
        state = state ^ (counter & _MASK32)
        for shift, factor in zip((16, 15), _FACTORS, strict=True):
            state = (state ^ (state >> shift)) * factor & _MASK32
        state = state ^ (state >> 16)
    return state


def hash_in_limbs(seed: int, step: Tensor, place: Tensor) -> Limbs:
    """As :func:`hash_of`, in limbs."""
    state: Any = _split(seed)
    for counter in (step, place):
        state = tuple(limb ^ other for limb, other in zip(state, _split(counter), strict=True))
        for shift, factor in zip((16, 15), _FACTORS, strict=True):
            state = _times(_xor_shifted(state, shift), factor)
        state = _xor_shifted(state, 16)
    limbs: Limbs = state
    return limbs


_found: Any = WeakTensorKeyDictionary()


def _limbs(seed: int, step: Tensor, n: int, device: torch.device | str | None) -> Limbs:
    """The hashes of n places, which take many operations and are shared by all blocks of a program."""
    known = _found.setdefault(step, {})
    if (seed, n) not in known:
        known[seed, n] = hash_in_limbs(seed, step, torch.arange(n, device=device))
    limbs: Limbs = known[seed, n]
    return limbs


def _split(x: Any) -> Any:
    """The limbs of the lower 32 bits of an integer, or of a tensor of integers."""
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
