"""The operations that PyTorch and the runtimes of exported programs need to compute in different ways."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmerge.ops.once import Device, first_numbers, once

Draw = tuple[int, Tensor]  # a seed, and the number of a step as a 0-dimensional integer tensor

FACTORS = (0x7FEB352D, 0x846CA68B)  # of the avalanche function "lowbias32"
_MASK32 = 0xFFFFFFFF


class Arithmetic:
    """These operations as PyTorch computes them."""

    def bits(self, value: Tensor) -> Tensor:
        """Return the bits of float32 numbers as signed integers in int64.

        >>> Arithmetic().bits(torch.tensor([0.0, 1.0, -2.0])).tolist()
        [0, 1065353216, -1073741824]
        """
        return value.view(torch.int32).to(torch.int64)

    def remainders(self, size: int, draw: Draw, n: int, device: Device) -> Tensor:
        """Return the hashes of n places modulo ``size``: ``[n]``.

        >>> Arithmetic().remainders(4, (0, torch.tensor(7)), 8, "cpu").tolist()
        [0, 2, 2, 2, 0, 1, 2, 2]
        """
        return hash_of(*draw, first_numbers(n, device)) % size

    def upper_bits(self, draw: Draw, n: int, device: Device) -> Tensor:
        """Return the upper 23 bits of the hashes of n places, as integers: ``[n]``."""
        return hash_of(*draw, first_numbers(n, device)) >> 9

    def add_rows(self, total: Tensor, index: Tensor, rows: Tensor) -> Tensor:
        """Return ``total`` ``[m, …]`` with each of the rows ``[r, …]`` added to its row at its index ``[r]``.

        ``total`` itself may change. Several rows may have the same index.
        """
        return total.index_add_(0, index, rows)


def hash_of(seed: int, step: Tensor, place: Tensor) -> Tensor:
    """Return uniform 32-bit integers from three counters, of the shape of ``place``, 0 ≤ place < 2³²."""
    # Each counter is added by an exclusive or. Then the state passes through x ^ x >> 16, two products, and
    # x ^ x >> 16 again. This step is linear, and for 32 bits its own inverse. So the one before the place is
    # added and the one after it cancel, and remain for the place alone.
    first, state = seed & _MASK32, step & _MASK32
    state = _multiplied(_folded(state ^ first if first else state))
    return _folded(_multiplied(state ^ once(place, "folded", lambda: _folded(place))))


def _folded(state: Tensor) -> Tensor:
    return state ^ (state >> 16)


def _multiplied(state: Tensor) -> Tensor:
    state = state * FACTORS[0] & _MASK32
    return (state ^ (state >> 15)) * FACTORS[1] & _MASK32


_pytorch = _in_exports = Arithmetic()


def use_in_exports(arithmetic: Arithmetic) -> None:
    """Let exported and traced programs compute by ``arithmetic`` from now on."""
    global _in_exports
    _in_exports = arithmetic


def arithmetic() -> Arithmetic:
    """Return what computes now: PyTorch, or what exported programs compute by while one is made."""
    # In the graphs of torch.compile, torch.compiler.is_exporting() is True too before torch 2.13.
    exporting = torch.compiler._is_exporting_flag or torch.jit.is_tracing()  # type: ignore[attr-defined]
    return _in_exports if exporting else _pytorch
