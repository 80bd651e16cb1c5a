"""Matching within overlapping tiles: dense products as in the global one, linear in the number of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tokenmerge.ops.matching import own_cell
from tokenmerge.ops.partition import num_tokens

__all__ = ["tiled_matching"]


def tiled_matching(
    features: Tensor, grid: Sequence[int], cell: Sequence[int], src: Tensor, dst: Tensor, side: int
) -> tuple[Tensor, Tensor]:
    """Connect each source to its most similar destination in the tile around it.

    The cells are cut into squares; the sources of one are compared with the destinations of a square twice as
    wide around it. Where that covers the grid, and cells divide it, this is :func:`bipartite_soft_matching`.

    Args:
        features: ``[b, n, c]``: what is compared, by cosine similarity.
        grid: (rows, columns) of the n tokens.
        cell: (height, width) of a cell in tokens.
        src: ``[s]`` indices of the sources.
        dst: ``[d]`` indices of the destinations, one for each cell in row order.
        side: of the inner squares, in cells, even.

    Returns:
        As :func:`tokenmerge.ops.bipartite_soft_matching`.
    """
    smallest = torch.finfo(features.dtype).tiny
    destinations = F.normalize(features.index_select(1, dst), dim=-1, eps=smallest)
    rows, columns = grid[0] // cell[0], grid[1] // cell[1]
    # The partition lists one source of each cell, then the next of each. Those beyond the last whole cell
    # follow: few, whose destination is that of the nearest cell.
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
    """Largest product of each source with the destinations of a window, and whose it is: ``[b, s]``."""
    candidates = destinations.index_select(1, window).transpose(1, 2)
    product, which = (features.index_select(1, sources) @ candidates).max(dim=-1)
    return product, window[which]


def _own(features: Tensor, destinations: Tensor, sources: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
    """The product of each source with the destination of its own cell."""
    tokens, own = features.index_select(1, sources), destinations.index_select(1, cells)
    return (tokens * own).sum(dim=-1), cells.expand(len(features), -1)


def _tiles(rows: int, columns: int, side: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """The cells of each square, and of the one around it: half a side more on each side, within the grid."""
    index = torch.arange(rows * columns, device=device).view(rows, columns)
    for top in range(0, rows, side):
        for left in range(0, columns, side):
            tile = index[top : top + side, left : left + side]
            above, before = (max(0, start - side // 2) for start in (top, left))
            around = index[above : top + side + side // 2, before : left + side + side // 2]
            yield tile.flatten(), around.flatten()
