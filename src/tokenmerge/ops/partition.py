"""Splits a token grid into destinations, one in each cell, and sources, which are all other tokens.

The destination of each cell is drawn at random, by a seed, the denoising step and the cell alone. So the
draws need no generator, are the same for all images of a batch, and can be recomputed in a backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmerge.ops.arithmetic import arithmetic
from tokenmerge.ops.once import Device, first_rows, made_once, once
from tokenmerge.ops.pytorch_arithmetic import Draw

Sides = tuple[int, ...]  # of a grid or a cell, in tokens: (rows, columns), or (frames, rows, columns)


def num_destinations(grid: Sequence[int], cell: Sequence[int]) -> int:
    """Return the number of whole cells in a grid of tokens.

    >>> num_destinations((5, 4), (2, 2))
    4
    """
    return num_tokens([side // stride for side, stride in zip(grid, cell, strict=True)])


def num_tokens(grid: Sequence[int]) -> int:
    """Count the tokens in a grid; like `math.prod`, which torch.compile cannot trace with dynamic sizes.

    >>> num_tokens((2, 3, 4))
    24
    """
    tokens = 1
    for side in grid:
        tokens *= side
    return tokens


@made_once
def whole_cells(grid: Sides, cell: Sides, device: Device) -> tuple[Tensor, Tensor]:
    """Return the tokens ``[k, d]`` at each of k positions of the d whole cells, and the others.

    Grid and cell are as for :func:`strided_partition`.

    >>> inside, outside = whole_cells((2, 5), (2, 2), "cpu")
    >>> inside.t().tolist(), outside.tolist()
    ([[0, 1, 5, 6], [2, 3, 7, 8]], [4, 9])
    """
    cells = [side // stride for side, stride in zip(grid, cell, strict=True)]
    every = torch.arange(num_tokens(grid), device=device)
    inside = every.view(grid)
    outside: list[Tensor] = []
    for axis, (side, count, stride) in enumerate(zip(grid, cells, cell, strict=True)):
        whole = count * stride
        outside.insert(0, inside.narrow(axis, whole, side - whole).flatten())
        inside = inside.narrow(axis, 0, whole)

    axes = len(grid)
    inside = inside.reshape([side for pair in zip(cells, cell, strict=True) for side in pair])
    inside = inside.permute(*range(1, 2 * axes, 2), *range(0, 2 * axes, 2))
    # ONNX cannot concatenate empty tensors only, so all tokens are put in front and cut off again.
    return inside.reshape(num_tokens(cell), num_tokens(cells)), torch.cat([every, *outside])[len(every) :]


def partition_at(inside: Tensor, outside: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Return sources and destinations as :func:`strided_partition`, from the result of :func:`whole_cells`.

    ``first`` is the position 0 … k−1 of the destination in each cell: ``[d]``, or ``[b, d]`` for each image,
    and then the results have a batch axis too.
    """
    # Rotate each cell so that its destination comes last.
    size, cells = inside.shape
    order = first_rows(size, 1, 1, inside.device) + first.unsqueeze(-2)
    twice = once(inside, "twice", lambda: torch.cat([inside, inside]))
    tokens = twice.expand(*order.shape[:-2], -1, -1).gather(-2, order).flatten(-2)
    src = tokens[..., :-cells]
    dst = tokens[..., -cells:]
    if not torch.compiler.is_compiling() and not len(outside):  # one launch less
        once(src, "with destinations", lambda: tokens, dst)
        return src, dst
    return torch.cat([src, outside.expand(*src.shape[:-1], -1)], dim=-1), dst


def with_destinations(src: Tensor, dst: Tensor) -> Tensor:
    """Return the indices of the sources, then those of the destinations: ``[…, s + d]``."""
    return once(src, "with destinations", lambda: torch.cat([src, dst], dim=-1), dst)


def strided_partition(
    grid: Sides, cell: Sides, *, draw: Draw | None = None, device: Device = None
) -> tuple[Tensor, Tensor]:
    """Split a token grid into sources and destinations (arXiv 2303.17604, section 4.1).

    Args:
        grid: (rows, columns), or (frames, rows, columns): n tokens, the last axis fastest.
        cell: its size along each axis, in tokens. Tokens beyond the last whole cell of an axis are sources.
        draw: ``(seed, step)`` of the pseudo-random destinations, or None if they are the first tokens of the
            cells.
        device: device of the result.

    Returns:
        Indices of the sources ``[n - d]`` and of the destinations ``[d]``.

    >>> src, dst = strided_partition((2, 5), (2, 2))
    >>> dst.tolist(), src.tolist()
    ([0, 2], [1, 3, 5, 7, 6, 8, 4, 9])
    """
    if draw is None:
        return _partition_without_draw(grid, cell, device)
    inside, outside = whole_cells(grid, cell, device)
    size, count = inside.shape
    return partition_at(inside, outside, arithmetic().choices(size, draw, count, device))


@made_once
def _partition_without_draw(grid: Sides, cell: Sides, device: Device) -> tuple[Tensor, Tensor]:
    inside, outside = whole_cells(grid, cell, device)
    return torch.cat([inside[1:].flatten(), outside]), inside[0]


def uniform_noise(draw: Draw, n: int, device: Device = None) -> Tensor:
    """Return pseudo-random float32 numbers ``[n]``, 0 < x < 1.

    >>> uniform_noise((0, torch.tensor(7)), 1000).mean().sub(0.5).abs().item() < 0.05
    True
    """
    # The upper 23 bits plus one half: float32 represents these numbers exactly.
    return (arithmetic().upper_bits(draw, n, device).to(torch.float32) + 0.5) * 2.0**-23
