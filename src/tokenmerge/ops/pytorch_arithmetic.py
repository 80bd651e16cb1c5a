"""How PyTorch computes the operations of :mod:`tokenmerge.ops.arithmetic`, and the hash that they draw by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenmerge.ops.once import Device, first_numbers, once

Draw = tuple[int, Tensor]  # a seed, and the number of a step as a 0-dimensional integer tensor

FACTORS = (0x7FEB352D, 0x846CA68B)  # of the avalanche function "lowbias32"
STEP_FACTOR = 0x9E3779B4  # 2³² divided by the golden ratio, as a multiple of four: small steps become large
_MASK32 = 0xFFFFFFFF


class Arithmetic:
    """These operations as PyTorch computes them."""

    def bits(self, value: Tensor) -> Tensor:
        """Return the bits of float32 numbers as signed integers in int64.

        >>> Arithmetic().bits(torch.tensor([0.0, 1.0, -2.0])).tolist()
        [0, 1065353216, -1073741824]
        """
        return value.view(torch.int32).to(torch.int64)

    def choices(self, size: int, draw: Draw, n: int, device: Device) -> Tensor:
        """Return a drawn integer 0 … ``size`` − 1 for each of n places: ``[n]``.

        >>> Arithmetic().choices(4, (0, torch.tensor(7)), 8, "cpu").tolist()
        [0, 1, 3, 1, 3, 0, 0, 3]
        """
        state = _mixed(*draw, first_numbers(n, device))
        bits = size.bit_length() - 1
        if size == 1 << bits:  # one launch less than below, and the same numbers
            return (state >> (32 - bits)) & (size - 1)
        return (state & _MASK32) * size >> 32

    def upper_bits(self, draw: Draw, n: int, device: Device) -> Tensor:
        """Return the upper 23 bits of the hashes of n places, as integers: ``[n]``."""
        return hash_of(*draw, first_numbers(n, device)) >> 9

    def add_rows(self, total: Tensor, index: Tensor, rows: Tensor) -> Tensor:
        """Return ``total`` ``[m, …]`` with each of the rows ``[r, …]`` added to its row at its index ``[r]``.

        ``total`` itself may change. Several rows may have the same index.
        """
        return total.index_add_(0, index, rows)


def hash_of(seed: int, step: Tensor, place: Tensor) -> Tensor:
    """Return pseudo-random 32-bit integers from three counters, of the shape of ``place``, 0 ≤ place < 2³².

    The part that does not depend on the step is computed once: a random number P of each place. The hash is
    the lower half of P · (C · step + 1), where C is a multiple of four. Of two steps, these factors are odd
    and differ by a multiple of four, so the difference between the two upper bits of both products depends on
    the lower bits of P alone. The lower bits of the result are worse. The two upper bits of the step do not
    count. For timesteps, those are the sign, and the bit that tells 2 from 0.
    """
    return _mixed(seed, step, place) & _MASK32


def _mixed(seed: int, step: Tensor, place: Tensor) -> Tensor:
    """Return the hash in the lower 32 bits of integers."""
    of_places = once(place, ("hashed", seed), lambda: avalanche(place ^ avalanche(seed & _MASK32)))
    return of_places * (step * STEP_FACTOR + 1)


def avalanche(state: Any) -> Any:
    """Return 32-bit integers of which each bit depends on all bits of ``state``, which has 32 bits too.

    This is "lowbias32" of C. Wellons, public domain. It takes integers or tensors of them.
    """
    state = (state ^ (state >> 16)) * FACTORS[0] & _MASK32
    state = (state ^ (state >> 15)) * FACTORS[1] & _MASK32
    return state ^ (state >> 16)
