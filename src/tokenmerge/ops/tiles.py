"""Matching in overlapping tiles: dense products with a cost that is linear in the number of tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tokenmerge.ops.matching import by_similarity, compared, directions, largest_products, own_cell
from tokenmerge.ops.once import WITHOUT_LAUNCHES, first_rows, made_once, once
from tokenmerge.ops.partition import Sides, num_destinations, num_tokens, whole_cells, with_destinations
from tokenmerge.ops.plan import MergePlan, make_plan, plan_of_rows

# Sides of a tile in cells, by the number of axes of the grid: images have two, videos three. Each source is
# compared with the destinations of a window twice as long: up to 32 × 32 cells, or 4 × 16 × 16 over time. So
# planning is linear in the tokens.
SIDES = {2: (16, 16), 3: (2, 8, 8)}
# A grid, a cell and the sides of a box, as for :func:`tiled_matching`, and the number of sources.
_Cut = tuple[Sides, Sides, Sides, int]


def tiled_matching(
    features: Tensor, grid: Sides, cell: Sides, src: Tensor, dst: Tensor, sides: Sides
) -> tuple[Tensor, Tensor]:
    """Connect each source to its most similar destination in the tile around it.

    The cells are divided into boxes, of at most ``sides`` cells along each axis, even numbers. The sources of
    a box are compared with the destinations of a window around it, up to twice as long along each axis. If
    one box covers the grid, and cells divide its rows and columns, the result is that of
    ``bipartite_soft_matching``.
    ``src`` ``[s]`` and ``dst`` ``[d]`` are those of ``strided_partition`` for this grid and cell.
    """
    sources, lengths, destinations = compared(features, src, dst)
    at_once = features.device.type not in WITHOUT_LAUNCHES
    runs, beyond, back = _layout((grid, cell, sides, len(src)), at_once, src.device)
    found = [_best(sources, destinations, *run) for run in runs]
    places, cells = beyond
    if len(places):
        products = sources.index_select(1, places) * destinations.index_select(1, cells)
        found.append((products.sum(dim=-1), cells.expand(len(sources), -1)))
    product, nearest = found[0]
    if len(found) > 1:
        product = torch.cat([of_run for of_run, _ in found], 1)
        nearest = torch.cat([of_run for _, of_run in found], 1)
    product = product.index_select(1, back)
    similarity = product if lengths is None else product / lengths
    return by_similarity(similarity), nearest.index_select(1, back)


def tiled_plan(
    features: Tensor, grid: Sides, cell: Sides, src: Tensor, dst: Tensor, sides: Sides, r: int
) -> MergePlan:
    """Return the plan of :func:`tiled_matching`, which takes the same arguments, for r tokens to remove.

    Where launches count and all boxes have equally many sources, it takes fewer of them: tokens are selected
    once, in the order of the boxes. Sources that are equally similar merge in this order then.
    """
    b = len(features)
    s = len(src)
    n = s + len(dst)
    device = features.device
    cut = grid, cell, sides, s
    boxes = None if device.type in WITHOUT_LAUNCHES else _boxes(cut, b, n, r, device)
    if boxes is None:
        return make_plan(src, dst, *tiled_matching(features, grid, cell, src, dst, sides), r)
    t, q, w = boxes.shape

    def arranged() -> tuple[Tensor, Tensor]:
        tokens = with_destinations(src, dst).index_select(0, boxes.chosen)
        return tokens[:-n], tokens[-n:] + first_rows(b, n, 0, device)

    chosen, rows = once(src, ("boxes", cut, b), arranged, dst)
    tokens = directions(features.index_select(1, chosen))
    in_boxes = tokens[:, : t * (q + w)].reshape(b * t, q + w, -1)
    product, which = largest_products(in_boxes[:, :q], in_boxes[:, q:])
    similarity = product.view(b, -1)
    targets = boxes.merged.gather(1, which).view(b, -1)
    if s > t * q:
        beyond, own_destinations = tokens[:, t * (q + w) :].chunk(2, dim=1)
        similarity = torch.cat([similarity, (beyond * own_destinations).sum(dim=-1)], dim=1)
        targets = torch.cat([targets, boxes.merged_own], dim=1)
    order = by_similarity(similarity)
    return plan_of_rows(rows, order, targets.gather(1, order[:, :r]))


def _best(sources: Tensor, destinations: Tensor, places: Tensor, windows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest product of each source with the destinations of its window, and their indices.

    Of each of t boxes, ``places`` ``[t, q]`` are the sources, and ``windows`` ``[t, w]`` the destinations
    around it. The results are ``[b, t * q]``.
    """
    in_boxes = sources.index_select(1, places.flatten()).unflatten(1, places.shape)
    candidates = destinations.index_select(1, windows.flatten()).unflatten(1, windows.shape)
    product, which = (in_boxes @ candidates.transpose(2, 3)).max(dim=-1)
    return product.flatten(1), windows.expand(len(sources), -1, -1).gather(2, which).flatten(1)


@made_once
def _layout(
    cut: _Cut, at_once: bool, device: torch.device
) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor], Tensor]:
    """Return which sources are compared with which destinations, all as places in the partition.

    Returns:
        For each product ``[t, q]`` sources and ``[t, w]`` destinations; the sources that only their own cell
        is compared with, and these cells; and for each source where it is in the results. There is one
        product of all tiles, in which the smaller ones repeat their last source and destination, or one of
        each tile. On a CPU, the next one then reuses the memory of the one before.
    """
    grid, cell, sides, sources = cut
    # The partition lists one source of every cell, then the next one of every cell. They are followed by the
    # few sources beyond the last whole cell of a row or column. These go to the destination of the nearest
    # cell. Whole frames beyond the last whole cell come last. They are compared in the tile before them.
    cells = num_destinations(grid, cell)
    inside = cells * (num_tokens(cell) - 1)
    left_over = grid[0] % cell[0] if len(grid) == 3 else 0
    behind = sources - left_over * num_tokens(grid[1:])
    by_cell = torch.arange(inside, device=device).view(-1, cells)
    late = torch.arange(behind, sources, device=device).view(left_over, *grid[1:]) if left_over else None
    of_tiles = []
    windows = []
    for tile, window, outside in _tiles(grid, cell, sides, device):
        of_tile = by_cell[:, tile].flatten()
        if late is not None and outside is not None:
            of_tile = torch.cat([of_tile, late[outside].flatten()])
        of_tiles.append(of_tile)
        windows.append(window)
    if at_once:
        runs = [(_padded(of_tiles), _padded(windows))]
    else:
        runs = [(one[None], window[None]) for one, window in zip(of_tiles, windows, strict=True)]
    beyond = torch.arange(inside, behind, device=device)
    own_destinations = own_cell(grid, cell, whole_cells(grid, cell, device)[1][: behind - inside])
    order = torch.cat([*(places.flatten() for places, _ in runs), beyond])
    back = torch.zeros(sources, dtype=torch.int64, device=device)
    return runs, (beyond, own_destinations), back.scatter(0, order, torch.arange(len(order), device=device))


class _Boxes(NamedTuple):
    """The boxes of a grid, for one product."""

    shape: tuple[int, int, int]  # t boxes with q sources each, which are compared with w destinations
    # Places in the partition: [t, q + w] sources and destinations of each box. Then, for the o sources that
    # only their own cell is compared with, these and its destinations. At the end, all n tokens: the sources
    # in the order of the boxes, and the destinations.
    chosen: Tensor
    merged: Tensor  # [b * t, w] rows of the destinations of each box in the merged sequences
    merged_own: Tensor  # [b, o] the same for the own cells of the o sources


@made_once
def _boxes(cut: _Cut, b: int, n: int, r: int, device: torch.device) -> _Boxes | None:
    """Return the boxes for b images of n tokens, of which r of s sources merge.

    It is None if some boxes are smaller than others.
    """
    [(places, windows)], (outside, own_destinations), _ = _layout(cut, True, device)
    s = cut[-1]
    if places.numel() + len(outside) != s:
        return None
    boxes = torch.cat([places, windows + s], dim=1).flatten()
    every = places.flatten(), outside, torch.arange(s, n, device=device)
    first = first_rows(b, n - r, s - r, device)
    merged = (windows.flatten() + first).view(-1, windows.shape[1])
    shape = (*places.shape, windows.shape[1])
    return _Boxes(
        shape, torch.cat([boxes, outside, own_destinations + s, *every]), merged, own_destinations + first
    )


def _padded(runs: Sequence[Tensor]) -> Tensor:
    """Stack runs of numbers, of which the shorter ones repeat their last number."""
    longest = max(map(len, runs))
    return torch.stack([torch.cat([run, run[-1:].expand(longest - len(run))]) for run in runs])


def boxes_along(cells: int, side: int) -> list[tuple[int, int]]:
    """Return where the boxes along an axis begin and end: as few as there must be, of about the same length.

    >>> boxes_along(26, 16), boxes_along(16, 16), boxes_along(35, 16)
    ([(0, 13), (13, 26)], [(0, 16)], [(0, 11), (11, 23), (23, 35)])
    """
    count = -(-cells // side)
    bounds = [i * cells // count for i in range(count + 1)]
    return list(itertools.pairwise(bounds))


def window_of(box: tuple[int, int], cells: int, side: int) -> tuple[int, int]:
    """Return where the window around a box begins and ends: half a side longer at each end.

    >>> window_of((13, 26), 26, 16)
    (5, 26)
    """
    start, end = box
    return max(0, start - side // 2), min(cells, end + side // 2)


def _tiles(
    grid: Sides, cell: Sides, sides: Sides, device: torch.device
) -> Iterator[tuple[Tensor, Tensor, tuple[slice, ...] | None]]:
    """Yield for each box its cells, the cells of the window around it, and its place in a frame, in tokens.

    The place is None unless its box is last in time.
    """
    counts = [side // stride for side, stride in zip(grid, cell, strict=True)]
    index = torch.arange(num_tokens(counts), device=device).view(counts)
    axes = [boxes_along(count, side) for count, side in zip(counts, sides, strict=True)]
    for box in itertools.product(*axes):
        tile = []
        window = []
        in_frame = []
        for (start, end), side, stride, count in zip(box, sides, cell, counts, strict=True):
            tile.append(slice(start, end))
            window.append(slice(*window_of((start, end), count, side)))
            in_frame.append(slice(start * stride, end * stride if end < count else None))
        outside = (slice(None), *in_frame[1:]) if tile[0].stop >= counts[0] else None
        yield index[tuple(tile)].flatten(), index[tuple(window)].flatten(), outside
