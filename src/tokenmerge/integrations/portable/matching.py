"""Each source's most similar destination, and the best of these edges first, as in ``tokenmerge.ops``."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tokenmerge.integrations.portable.arrays import Array, Arrays
from tokenmerge.integrations.portable.partition import own_cell

# How many similarities are held at once, so that memory grows linearly with the number of tokens.
_SIMILARITIES_AT_ONCE = 1 << 23


def bipartite_soft_matching(
    xp: Arrays, features: Array, src: np.ndarray, dst: np.ndarray
) -> tuple[Array, Array]:
    """Connect each source to its most similar destination (arXiv 2210.09461, section 3).

    Args:
        xp: operations for ``features``.
        features: ``[b, n, c]``: what is compared, by cosine similarity.
        src: ``[s]`` indices of the sources.
        dst: ``[d]`` indices of the destinations, d ≥ 1.

    Returns:
        ``(order, nearest)``, both ``[b, s]``: positions in ``src`` from the most to the least similar edge,
        and for each source the position in ``dst`` of its destination.
    """
    sources = _select(xp, features, src)
    product, nearest = _best(xp, sources, _unit(xp, _select(xp, features, dst)))
    # The length of a source does not change which destination is nearest, so it divides last and once.
    return xp.descending(product / xp.length(sources)[..., 0]), nearest


def tiled_matching(
    xp: Arrays,
    features: Array,
    grid: tuple[int, int],
    cell: tuple[int, int],
    src: np.ndarray,
    dst: np.ndarray,
    side: int,
) -> tuple[Array, Array]:
    """Connect each source to its most similar destination in the tile around it.

    The cells are divided into square tiles. The sources of a tile are compared with the destinations of a
    square around it that is twice as wide.

    Args:
        xp: operations for ``features``.
        features: ``[b, n, c]``: what is compared, by cosine similarity.
        grid: (rows, columns) of the n tokens.
        cell: (height, width) of a cell in tokens.
        src: ``[s]`` indices of the sources.
        dst: ``[d]`` indices of the destinations, one for each cell in row order.
        side: side of a tile in cells, an even number.

    Returns:
        As :func:`bipartite_soft_matching`.
    """
    sources, destinations = _select(xp, features, src), _unit(xp, _select(xp, features, dst))
    rows, columns = grid[0] // cell[0], grid[1] // cell[1]
    # The partition lists the first source of each cell, then the second of each, and so on. Those beyond the
    # last whole cell follow. They are few, and take the destination of the nearest cell.
    inside = len(dst) * (cell[0] * cell[1] - 1)
    by_cell = np.arange(inside).reshape(-1, len(dst))
    places, products, nearest = [], [], []
    for tile, window in _tiles(rows, columns, side):
        place = by_cell[:, tile].ravel()
        product, which = _best(xp, _select(xp, sources, place), _select(xp, destinations, window))
        places.append(place)
        products.append(product)
        nearest.append(xp.take(xp.index(window, features), which.reshape([-1])).reshape(which.shape))
    if inside < len(src):
        own, beyond = own_cell(grid, cell, src[inside:]), np.arange(inside, len(src))
        product = _select(xp, sources, beyond) * _select(xp, destinations, own)
        places.append(beyond)
        products.append(product.sum(-1))
        nearest.append(xp.repeat(xp.index(own, features), features.shape[0]))
    back = xp.repeat(xp.index(np.argsort(np.concatenate(places)), features), features.shape[0])
    product, target = (xp.take_along(xp.concat(parts, 1), back) for parts in (products, nearest))
    return xp.descending(product / xp.length(sources)[..., 0]), target


def shared_features(xp: Arrays, features: Array, parts: int) -> Array:
    """Features by which ``parts`` images get one plan: ``[parts * b, n, c]`` → ``[b, n, parts * c]``.

    Their cosine similarity is the mean of the images' similarities. Images b apart share a plan, such as the
    two halves of a batch with classifier-free guidance.
    """
    unit, b = _unit(xp, features), features.shape[0] // parts
    return xp.concat([unit[i * b : (i + 1) * b] for i in range(parts)], 2)


def _select(xp: Arrays, x: Array, index: np.ndarray) -> Array:
    """Tokens of all images by one index: ``[b, n, c]`` → ``[b, k, c]``."""
    b, n, c = x.shape
    rows = (np.arange(b)[:, None] * n + index).ravel()
    return xp.take(x.reshape([b * n, c]), xp.index(rows, x)).reshape([b, len(index), c])


def _unit(xp: Arrays, x: Array) -> Array:
    return x / xp.length(x)


def _best(xp: Arrays, sources: Array, destinations: Array) -> tuple[Array, Array]:
    """Largest product of each source with a destination, and the index of that one: ``[b, s]`` each."""
    b, d, _ = destinations.shape
    columns = xp.transpose(destinations)
    step = max(1, _SIMILARITIES_AT_ONCE // (b * d))
    found = [
        xp.largest(sources[:, start : start + step] @ columns) for start in range(0, sources.shape[1], step)
    ]
    if len(found) == 1:
        return found[0]
    return xp.concat([part[0] for part in found], 1), xp.concat([part[1] for part in found], 1)


def _tiles(rows: int, columns: int, side: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The cells of each tile, and of the square around it: half a side more on each side, within the grid."""
    index = np.arange(rows * columns).reshape(rows, columns)
    for top in range(0, rows, side):
        for left in range(0, columns, side):
            above, before = (max(0, start - side // 2) for start in (top, left))
            around = index[above : top + side + side // 2, before : left + side + side // 2]
            yield index[top : top + side, left : left + side].ravel(), around.ravel()
