"""Which tokens of a grid are destinations: one in each cell, the rest are sources."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["num_destinations", "strided_partition"]

_MASK32 = 0xFFFFFFFF


def num_destinations(height: int, width: int, sx: int, sy: int) -> int:
    """Number of whole ``sy`` × ``sx`` cells in a grid of ``height`` × ``width`` tokens.

    >>> num_destinations(5, 4, sx=2, sy=2)
    4
    """
    return (height // sy) * (width // sx)


def strided_partition(
    height: int,
    width: int,
    sx: int,
    sy: int,
    *,
    draw: tuple[int, Tensor] | None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Split a token grid into sources and destinations (arXiv 2303.17604, section 4.1).

    Args:
        height: rows of the token grid.
        width: columns of the token grid. Neither needs to be a multiple of its stride: the tokens right of
            and below the last whole cell are sources.
        sx: width of a cell in tokens.
        sy: height of a cell in tokens.
        draw: ``(seed, step)``: take a pseudo-random token of each cell as its destination, a function of
            the seed, the step (an integer tensor of no dimensions) and the cell alone, so that it needs no
            generator, is the same for all images of a batch and can be recomputed in a backward pass.
            None: the top left token of each cell.
        device: where the result lives.

    Returns:
        Indices of the sources ``[n - d]`` and of the destinations ``[d]``, with n = height·width and
        d = :func:`num_destinations`; together a permutation of 0 … n−1.

    >>> src, dst = strided_partition(2, 5, sx=2, sy=2)
    >>> dst.tolist(), src.tolist()
    ([0, 2], [1, 3, 5, 7, 6, 8, 4, 9])
    """
    rows, columns = height // sy, width // sx
    cell_y = torch.arange(rows, device=device).unsqueeze(1)
    cell_x = torch.arange(columns, device=device)
    corner = (cell_y * sy * width + cell_x * sx).flatten()

    if draw is None:
        first = torch.zeros_like(corner)
    else:
        seed, step = draw
        first = _hash(seed, step, (cell_y * columns + cell_x).flatten()) % (sx * sy)
    # Position 0 of a cell is its destination; the others follow it round the cell.
    within = torch.arange(sx * sy, device=device).unsqueeze(1) + first
    within = within % (sx * sy)
    tokens = corner + within // sx * width + within % sx

    grid = torch.arange(height * width, device=device).view(height, width)
    outside = [grid[: rows * sy, columns * sx :].flatten(), grid[rows * sy :].flatten()]
    return torch.cat([tokens[1:].flatten(), *outside]), tokens[0]


def _hash(seed: int, step: Tensor, cell: Tensor) -> Tensor:
    """Uniform 32-bit integers from three counters.

    Each counter passes through the avalanche function "lowbias32" (C. Wellons, public domain), whose output
    bits each change with probability 1/2 when one input bit changes.
    """
    state = torch.full_like(cell, seed & _MASK32)
    for counter in (step, cell):
        state = state ^ (counter & _MASK32)
        state = (state ^ (state >> 16)) * 0x7FEB352D & _MASK32
        state = (state ^ (state >> 15)) * 0x846CA68B & _MASK32
        state = state ^ (state >> 16)
    return state
