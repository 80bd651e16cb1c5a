"""Which tokens of a grid are destinations: the same numbers as ``tokenmerge.ops.partition``, by NumPy."""

from __future__ import annotations

import functools

import numpy as np

_MASK32 = 0xFFFFFFFF


def step_number(timestep: float) -> int:
    """Return the integer that stands for a denoising step: the bits of its timestep as float32.

    >>> step_number(1.0) == 0x3F800000
    True
    """
    return int(np.float32(timestep).view(np.int32))


@functools.lru_cache(maxsize=32)  # all blocks of one resolution ask for the same one at each step
def partition(
    grid: tuple[int, int], cell: tuple[int, int], draw: tuple[int, int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Split a token grid into sources and destinations (arXiv 2303.17604, section 4.1).

    Args:
        grid: (rows, columns) of n tokens, the columns fastest.
        cell: (height, width) of a cell. Tokens beyond the last whole cell of an axis are sources.
        draw: ``(seed, step)``: take a pseudo-random token of each cell as its destination, a function of the
            seed, the step and the cell alone. None: the first token of each cell.

    Returns:
        Read-only indices of the sources ``[n - d]`` and of the destinations ``[d]`` for d whole cells;
        together a permutation of 0 … n−1.

    >>> src, dst = partition((2, 5), (2, 2))
    >>> dst.tolist(), src.tolist()
    ([0, 2], [1, 3, 5, 7, 6, 8, 4, 9])
    """
    (height, width), (rows, columns) = cell, (grid[0] // cell[0], grid[1] // cell[1])
    tokens = np.arange(grid[0] * grid[1], dtype=np.int64).reshape(grid)
    # [k, d]: by position within the cell, and by cell.
    cells = tokens[: rows * height, : columns * width].reshape(rows, height, columns, width)
    inside = cells.transpose(1, 3, 0, 2).reshape(height * width, rows * columns)
    outside = [tokens[: rows * height, columns * width :].ravel(), tokens[rows * height :].ravel()]
    if draw is not None:
        # The destination comes first; the others follow it round the cell.
        first = _hash(*draw, np.arange(rows * columns, dtype=np.int64)) % len(inside)
        inside = np.take_along_axis(inside, (np.arange(len(inside))[:, None] + first) % len(inside), axis=0)
    src, dst = np.concatenate([inside[1:].ravel(), *outside]), inside[0].copy()
    src.flags.writeable = dst.flags.writeable = False
    return src, dst


def own_cell(grid: tuple[int, int], cell: tuple[int, int], tokens: np.ndarray) -> np.ndarray:
    """Return the cell of each token, in row order; beyond the last whole cell, the nearest one.

    >>> own_cell((3, 4), (2, 2), np.array([0, 3, 6, 11])).tolist()
    [0, 1, 1, 1]
    """
    rows, columns = grid[0] // cell[0], grid[1] // cell[1]
    row = np.minimum(tokens // grid[1] // cell[0], rows - 1)
    column = np.minimum(tokens % grid[1] // cell[1], columns - 1)
    return row * columns + column


def _hash(seed: int, step: int, place: np.ndarray) -> np.ndarray:
    """Make uniform 32-bit integers from three counters, as int64.

    Each counter passes through the avalanche function "lowbias32" (C. Wellons, public domain), whose output
    bits each change with probability 1/2 when one input bit changes.
    """
    # As int64, products of 32 and 31 bits do not overflow.
    state = np.full(place.shape, seed & _MASK32, dtype=np.int64)
    for counter in (step & _MASK32, place):
        state = state ^ counter
        state = (state ^ (state >> 16)) * 0x7FEB352D & _MASK32
        state = (state ^ (state >> 15)) * 0x846CA68B & _MASK32
        state = state ^ (state >> 16)
    return state
