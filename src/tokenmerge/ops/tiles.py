"""Matching in overlapping tiles: dense products with a cost that is linear in the number of tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tokenmerge.ops.matching import own_cell
from tokenmerge.ops.partition import num_tokens


def tiled_matching(
    features: Tensor,
    grid: Sequence[int],
    cell: Sequence[int],
    src: Tensor,
    dst: Tensor,
    sides: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Connect each source to its most similar destination in the tile around it.

    The cells are divided into boxes. The sources of a box are compared with the destinations of a window
    around it, which is twice as long along each axis. If one box covers the grid, and cells divide its rows
    and columns, the result is that of :func:`bipartite_soft_matching`.

    Args:
        features: ``[b, n, c]``, compared by cosine similarity.
        grid: (rows, columns), or (frames, rows, columns) of the n tokens.
        cell: size of a cell in tokens along each axis.
        src: ``[s]`` indices of the sources.
        dst: ``[d]`` indices of the destinations, one for each cell in the order of the grid.
        sides: length of a box in cells along each axis, even numbers.

    Returns:
        As :func:`tokenmerge.ops.bipartite_soft_matching`.
    """
    smallest = torch.finfo(features.dtype).tiny
    destinations = F.normalize(features.index_select(1, dst), dim=-1, eps=smallest)
    # The partition lists one source of every cell, then the next one of every cell. They are followed by the
    # few sources beyond the last whole cell of a row or column. These go to the destination of the nearest
    # cell. Whole frames beyond the last whole cell come last. They are compared in the tile before them.
    inside = len(dst) * (num_tokens(cell) - 1)
    left_over = grid[0] % cell[0] if len(grid) == 3 else 0
    behind = len(src) - left_over * num_tokens(grid[1:])
    by_cell = torch.arange(inside, device=src.device).view(-1, len(dst))
    late = torch.arange(behind, len(src), device=src.device).view(left_over, *grid[1:]) if left_over else None
    places, found = [], []
    for tile, window, outside in _tiles(grid, cell, sides, src.device):
        of_tile = by_cell[:, tile].flatten()
        if late is not None and outside is not None:
            of_tile = torch.cat([of_tile, late[outside].flatten()])
        places.append(of_tile)
        found.append(_best(features, destinations, src[of_tile], window))
    if inside < behind:
        beyond = src[inside:behind]
        places.append(torch.arange(inside, behind, device=src.device))
        found.append(_own(features, destinations, beyond, own_cell(grid, cell, beyond)))
    back = torch.cat(places).argsort()
    product, nearest = (torch.cat(parts, dim=1).index_select(1, back) for parts in zip(*found, strict=True))
    length = features.index_select(1, src).norm(dim=-1).clamp(min=smallest)
    return (product / length).argsort(dim=-1, descending=True), nearest


def _best(features: Tensor, destinations: Tensor, sources: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
    """Largest product of each source with the destinations of a window, and its index: ``[b, s]`` each."""
    candidates = destinations.index_select(1, window).transpose(1, 2)
    product, which = (features.index_select(1, sources) @ candidates).max(dim=-1)
    return product, window[which]


def _own(features: Tensor, destinations: Tensor, sources: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
    """The product of each source with the destination of its own cell, and the cell: ``[b, s]`` each."""
    tokens, own = features.index_select(1, sources), destinations.index_select(1, cells)
    return (tokens * own).sum(dim=-1), cells.expand(len(features), -1)


def _tiles(
    grid: Sequence[int], cell: Sequence[int], sides: Sequence[int], device: torch.device
) -> Iterator[tuple[Tensor, Tensor, tuple[slice, ...] | None]]:
    """For each box its cells, the cells of the window around it, and its place in a frame.

    A window is longer than its box by half a side at each end of each axis. The place is in tokens, and None
    unless the box is the last one in time.
    """
    counts = [side // stride for side, stride in zip(grid, cell, strict=True)]
    index = torch.arange(num_tokens(counts), device=device).view(counts)
    for starts in itertools.product(
        *(range(0, count, side) for count, side in zip(counts, sides, strict=True))
    ):
        ends = [start + side for start, side in zip(starts, sides, strict=True)]
        tile = index[tuple(map(slice, starts, ends))]
        margins = [side // 2 for side in sides]
        above = (max(0, start - margin) for start, margin in zip(starts, margins, strict=True))
        below = (end + margin for end, margin in zip(ends, margins, strict=True))
        window = index[tuple(map(slice, above, below))]
        in_frame = (
            slice(start * stride, end * stride if end < count else None)
            for start, end, stride, count in zip(starts, ends, cell, counts, strict=True)
        )
        is_last = ends[0] >= counts[0]
        yield tile.flatten(), window.flatten(), (slice(None), *tuple(in_frame)[1:]) if is_last else None
