"""What the settings make of a token grid: its parts and cells, the tokens removed, the partition."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmerge.config import MergeSettings
from tokenmerge.ops import num_destinations, num_tokens, strided_partition


def num_removed(grid: Sequence[int], settings: MergeSettings) -> int:
    """Number of tokens that the ratio removes from a grid of (frames, rows, columns), over all frames.

    It is ratio · n, rounded down for each part of the grid that merges on its own. It is 0 for a grid of
    fewer than ``min_tokens`` tokens, or without a whole cell.

    >>> num_removed((1, 64, 64), MergeSettings(ratio=0.5)), num_removed((1, 1, 9), MergeSettings(ratio=0.5))
    (2048, 0)
    """
    if num_tokens(grid) < settings.min_tokens:
        return 0
    parts, part = split(grid, settings)
    if not num_destinations(part, cell_of(part, settings)):
        return 0
    return parts * int(num_tokens(part) * settings.ratio)


def split(grid: Sequence[int], settings: MergeSettings) -> tuple[int, tuple[int, ...]]:
    """Number of parts of a grid of (frames, rows, columns) that merge on their own, and the grid of one part.

    The parts are the frames, with a grid of (rows, columns). Where cells have several frames (``st`` > 1),
    the whole grid is one part.
    """
    return (grid[0], tuple(grid[1:])) if settings.st == 1 else (1, tuple(grid))


def cell_of(part: Sequence[int], settings: MergeSettings) -> tuple[int, ...]:
    """Size of the cells of a part in tokens, with the same axes as the grid of the part."""
    return (settings.st, settings.sy, settings.sx)[-len(part) :]


def partition(
    part: Sequence[int], settings: MergeSettings, step: Tensor, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Sources ``[n - d]`` and destinations ``[d]`` of a part: :func:`tokenmerge.ops.strided_partition`.

    The destination of each cell is drawn anew for each ``step`` and ``settings.seed``, or is the first token
    of the cell where ``settings.use_rand`` is off.
    """
    draw = (settings.seed, step) if settings.use_rand else None
    return strided_partition(part, cell_of(part, settings), draw=draw, device=device)
