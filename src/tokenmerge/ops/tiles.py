"""Matching in overlapping tiles: dense products with a cost that is linear in the number of tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tokenmerge.ops import kernels
from tokenmerge.ops.matching import by_similarity, compared, own_cell
from tokenmerge.ops.once import made_once
from tokenmerge.ops.partition import num_destinations, num_tokens, whole_cells


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
    sources, lengths, destinations = compared(features, src, dst)
    runs, beyond, back = _layout(tuple(grid), tuple(cell), tuple(sides), len(src), src.device)
    found = [_best(sources, destinations, *run) for run in runs]
    if beyond is not None:
        found.append(_own(sources, destinations, *beyond))
    product, nearest = (
        found[0] if len(found) == 1 else (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    )
    return by_similarity(product.index_select(1, back) / lengths), nearest.index_select(1, back)


def _best(sources: Tensor, destinations: Tensor, places: Tensor, windows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest product of each source with the destinations of its window, and their indices.

    Args:
        sources: ``[b, s, c]``.
        destinations: ``[b, d, c]``.
        places: ``[t, q]`` which q of the sources are in each of t boxes.
        windows: ``[t, w]`` which w of the destinations each of these is compared with.

    Returns:
        ``[b, t * q]`` each.
    """
    if kernels.used(sources, destinations):
        return kernels.largest_products(sources, destinations, places, windows)
    in_boxes = sources.index_select(1, places.flatten()).unflatten(1, places.shape)
    candidates = destinations.index_select(1, windows.flatten()).unflatten(1, windows.shape)
    product, which = (in_boxes @ candidates.transpose(2, 3)).max(dim=-1)
    nearest = windows.expand(len(sources), -1, -1).gather(2, which)
    return product.flatten(1), nearest.flatten(1)


def _own(sources: Tensor, destinations: Tensor, places: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
    """Return each source's product with the destination of its own cell, and the cell: ``[b, s]`` each."""
    tokens, own = sources.index_select(1, places), destinations.index_select(1, cells)
    return (tokens * own).sum(dim=-1), cells.expand(len(sources), -1)


@made_once
def _layout(
    grid: tuple[int, ...], cell: tuple[int, ...], sides: tuple[int, ...], sources: int, device: torch.device
) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor] | None, Tensor]:
    """Return which sources are compared with which destinations, all as places in the partition.

    Returns:
        For each product ``[t, q]`` sources and ``[t, w]`` destinations; the sources that only their own cell
        is compared with, and these cells, if there are any; and for each source where it is in the results.
    """
    # The partition lists one source of every cell, then the next one of every cell. They are followed by the
    # few sources beyond the last whole cell of a row or column. These go to the destination of the nearest
    # cell. Whole frames beyond the last whole cell come last. They are compared in the tile before them.
    cells = num_destinations(grid, cell)
    inside = cells * (num_tokens(cell) - 1)
    left_over = grid[0] % cell[0] if len(grid) == 3 else 0
    behind = sources - left_over * num_tokens(grid[1:])
    by_cell = torch.arange(inside, device=device).view(-1, cells)
    late = torch.arange(behind, sources, device=device).view(left_over, *grid[1:]) if left_over else None
    tiles: list[tuple[Tensor, Tensor]] = []
    for tile, window, outside in _tiles(grid, cell, sides, device):
        of_tile = by_cell[:, tile].flatten()
        if late is not None and outside is not None:
            of_tile = torch.cat([of_tile, late[outside].flatten()])
        tiles.append((of_tile, window))
    runs = _one_by_one(tiles) if device.type == "cpu" else _at_once(tiles)
    beyond = None
    if inside < behind:
        places = torch.arange(inside, behind, device=device)
        beyond = places, own_cell(grid, cell, whole_cells(grid, cell, device)[1][: behind - inside])
    order = torch.cat([*(places.flatten() for places, _ in runs), *([] if beyond is None else beyond[:1])])
    back = torch.zeros(sources, dtype=torch.int64, device=device)
    return runs, beyond, back.scatter(0, order, torch.arange(len(order), device=device))


def _one_by_one(tiles: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Return a product for each tile. On a CPU, the next one reuses the memory of the one before."""
    return [(places.unsqueeze(0), window.unsqueeze(0)) for places, window in tiles]


def _at_once(tiles: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Return one product of all tiles. The smaller ones repeat their last source and destination."""

    def padded(runs: Sequence[Tensor]) -> Tensor:
        longest = max(len(run) for run in runs)
        return torch.stack([torch.cat([run, run[-1:].expand(longest - len(run))]) for run in runs])

    places, windows = zip(*tiles, strict=True)
    return [(padded(places), padded(windows))]


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
