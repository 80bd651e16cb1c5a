"""Matching in overlapping tiles: dense products with a cost that is linear in the number of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tokenmerge.ops.matching import own_cell
from tokenmerge.ops.partition import num_tokens


def tiled_matching(
    features: Tensor, grid: Sequence[int], cell: Sequence[int], src: Tensor, dst: Tensor, side: int
) -> tuple[Tensor, Tensor]:
    """Connect each source to its most similar destination in the tile around it.

    The cells are divided into squares. The sources of a square are compared with the destinations of a square
    twice as wide around it. If that covers the grid and cells divide the grid, the result is that of
    :func:`bipartite_soft_matching`.

    Args:
        features: ``[b, n, c]``, compared by cosine similarity.
        grid: (rows, columns) of the n tokens.
        cell: (height, width) of a cell in tokens.
        src: ``[s]`` indices of the sources.
        dst: ``[d]`` indices of the destinations, one for each cell in row order.
        side: side of a square in cells, an even number.

    Returns:
        As :func:`tokenmerge.ops.bipartite_soft_matching`.
    """
    smallest = torch.finfo(features.dtype).tiny
    destinations = F.normalize(features.index_select(1, dst), dim=-1, eps=smallest)
    rows, columns = grid[0] // cell[0], grid[1] // cell[1]
    # The partition lists one source of every cell, then the next one of every cell, and at the end the few
    # sources beyond the last whole cell, which go to the destination of the nearest cell.
    inside = len(dst) * (num_tokens(cell) - 1)
    by_cell = torch.arange(inside, device=src.device).view(-1, len(dst))
    places, found = [], []
    for tile, window in _tiles(rows, columns, side, src.device):
        places.append(by_cell[:, tile].flatten())
        found.append(_best(features, destinations, src[places[-1]], window))
    if inside < len(src):
        places.append(torch.arange(inside, len(src), device=src.device))
        found.append(_own(features, destinations, src[inside:], own_cell(grid, cell, src[inside:])))
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


def _tiles(rows: int, columns: int, side: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """The cells of each square, and of the square around it, which is wider by half a side on each side."""
    index = torch.arange(rows * columns, device=device).view(rows, columns)
    for top in range(0, rows, side):
        for left in range(0, columns, side):
            tile = index[top : top + side, left : left + side]
            above, before = (max(0, start - side // 2) for start in (top, left))
            around = index[above : top + side + side // 2, before : left + side + side // 2]
            yield tile.flatten(), around.flatten()
