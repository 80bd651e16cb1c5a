"""Token merging for array libraries other than PyTorch: the counterpart of ``tokenmerge.ops``.

It needs only NumPy. Functions mean what those of the same names in ``tokenmerge.ops`` mean, and tests compare
their plans on the same arrays. ``xp`` has the operations that array libraries spell differently, as
``paddle.arrays.PaddleArrays`` defines them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from tokenmerge.config import MergeSettings

Array = Any
PLANNERS = ("tome", "uniform")
# How many similarities are held at once, so that memory grows linearly with the number of tokens.
_SIMILARITIES_AT_ONCE = 1 << 23
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


class Plan(NamedTuple):
    """A plan that merges n tokens into m = n − r: see ``tokenmerge.ops.IndexPlan``."""

    keep: Array
    sources: Array
    targets: Array
    inverse: Array
    sizes: Array


def num_removed(grid: tuple[int, int], settings: MergeSettings) -> int:
    """Return the number of tokens removed from a grid of (rows, columns); 0 if nothing merges.

    It is ratio · n, rounded down; ``"uniform"`` removes every source, whatever the ratio.
    """
    n, cells = grid[0] * grid[1], (grid[0] // settings.sy) * (grid[1] // settings.sx)
    r = int(n * settings.ratio) if cells and n >= settings.min_tokens else 0
    return n - cells if r and settings.planner == "uniform" else r


def plan_tokens(
    xp: Any, features: Array, grid: tuple[int, int], settings: MergeSettings, step: int, parts: int = 1
) -> Plan | None:
    """Plan one merge: partition, match, keep the r best edges.

    Args:
        xp: operations for ``features``.
        features: ``[b, n, c]``: the block's input.
        grid: (rows, columns) of its n tokens, the columns fastest.
        settings: planner, ratio, strides and the seed of the partition.
        step: number of the denoising step, as :func:`step_number` makes it.
        parts: number of images, b / ``parts`` apart, that share a plan, such as those of the two prompts of
            guidance.

    Returns:
        The plan, or None if no token would be removed.
    """
    r, cell = num_removed(grid, settings), (settings.sy, settings.sx)
    if r == 0:
        return None
    if parts > 1:
        shared = plan_tokens(xp, shared_features(xp, features, parts), grid, settings, step)
        assert shared is not None  # r > 0
        return repeated(xp, shared, parts)
    src, dst = partition(grid, cell, None if settings.seed is None else (settings.seed, step))
    if settings.planner == "tome":
        order, nearest = bipartite_soft_matching(xp, features, src, dst)
    else:
        own = [np.arange(len(src)), own_cell(grid, cell, src)]
        order, nearest = (_repeat(xp, xp.index(index, features), features.shape[0]) for index in own)
    return make_plan(xp, src, dst, order, nearest, r)


def bipartite_soft_matching(
    xp: Any, features: Array, src: np.ndarray, dst: np.ndarray
) -> tuple[Array, Array]:
    """Connect each source to its most similar destination (arXiv 2210.09461, section 3)."""
    sources = _select(xp, features, src)
    product, nearest = _best(xp, sources, _unit(xp, _select(xp, features, dst)))
    # The length of a source does not change which destination is nearest, so it divides last and once.
    return xp.descending(product / xp.length(sources)[..., 0]), nearest


def shared_features(xp: Any, features: Array, parts: int) -> Array:
    """Make features by which ``parts`` images get one plan: ``[parts * b, n, c]`` → ``[b, n, parts * c]``."""
    unit, b = _unit(xp, features), features.shape[0] // parts
    return xp.concat([unit[i * b : (i + 1) * b] for i in range(parts)], 2)


def make_plan(xp: Any, src: np.ndarray, dst: np.ndarray, order: Array, nearest: Array, r: int) -> Plan:
    """Merge the r sources with the best edges, leave all other tokens alone."""
    (b, s), n = order.shape, len(src) + len(dst)
    m = n - r
    image = np.arange(b)[:, None]
    tokens, merged_tokens = xp.index(image * n, order), xp.index(image * m, order)

    # Merged sequence: the sources left alone, then the destinations.
    by_edge = xp.take(xp.index(src, order), order.reshape([-1])).reshape([b, s]) + tokens
    sources, alone = by_edge[:, :r], by_edge[:, r:]
    keep = xp.concat([alone, _repeat(xp, xp.index(dst, order), b) + tokens], 1)
    targets = xp.take_along(nearest, order[:, :r]) + (s - r) + merged_tokens
    places = xp.concat([keep, sources], 1).reshape([-1])
    holders = xp.concat([_repeat(xp, xp.index(np.arange(m), order), b) + merged_tokens, targets], 1)
    inverse = xp.put(xp.index(np.zeros(b * n, np.int64), order), places, holders.reshape([-1]))
    sizes = xp.add(xp.count([b * m], order), targets.reshape([-1]), xp.count([b * r], order))
    return Plan(keep, sources, targets, inverse.reshape([b, n]), sizes.reshape([b, m]))


def merge(xp: Any, plan: Plan, x: Array) -> Array:
    """Replace merged tokens by their mean, summed in float32 or better: ``[b, n, c]`` → ``[b, m, c]``."""
    b, n, c = x.shape
    rows = x.reshape([b * n, c])
    kept, moved = (xp.exact(xp.take(rows, index.reshape([-1]))) for index in (plan.keep, plan.sources))
    total = xp.add(kept, plan.targets.reshape([-1]), moved)
    mean = total / xp.as_type(plan.sizes, total).reshape([-1, 1])
    return xp.as_type(mean, x).reshape([b, -1, c])


def keep_destinations(xp: Any, plan: Plan, x: Array) -> Array:
    """Keep the tokens whose place merged ones take, and drop the others: ``[b, n, c]`` → ``[b, m, c]``."""
    return _rows(xp, x, plan.keep)


def unmerge(xp: Any, plan: Plan, y: Array) -> Array:
    """Give each token the result of the merged token that holds it: ``[b, m, c]`` → ``[b, n, c]``."""
    return _rows(xp, y, plan.inverse)


def repeated(xp: Any, plan: Plan, times: int) -> Plan:
    """Return the plan for ``times`` · b images: b that merge as this plan says, then b more, and so on."""
    (b, m), n = plan.keep.shape, plan.inverse.shape[1]

    def again(rows: Array, of_one: int) -> Array:
        return xp.concat([rows + i * b * of_one for i in range(times)], 0)

    return Plan(
        keep=again(plan.keep, n),
        sources=again(plan.sources, n),
        targets=again(plan.targets, m),
        inverse=again(plan.inverse, m),
        sizes=again(plan.sizes, 0),
    )


def _rows(xp: Any, x: Array, index: Array) -> Array:
    b, n, c = x.shape
    return xp.take(x.reshape([b * n, c]), index.reshape([-1])).reshape([b, -1, c])


def _select(xp: Any, x: Array, index: np.ndarray) -> Array:
    """Select tokens of all images by one index: ``[b, n, c]`` → ``[b, k, c]``."""
    b, n, c = x.shape
    rows = (np.arange(b)[:, None] * n + index).ravel()
    return xp.take(x.reshape([b * n, c]), xp.index(rows, x)).reshape([b, len(index), c])


def _unit(xp: Any, x: Array) -> Array:
    return x / xp.length(x)


def _best(xp: Any, sources: Array, destinations: Array) -> tuple[Array, Array]:
    """Return each source's largest product with a destination, and the index of that one: ``[b, s]`` each."""
    b, d, _ = destinations.shape
    columns = destinations.transpose([0, 2, 1])
    step = max(1, _SIMILARITIES_AT_ONCE // (b * d))
    found = [
        xp.largest(sources[:, start : start + step] @ columns) for start in range(0, sources.shape[1], step)
    ]
    if len(found) == 1:
        return found[0]
    return xp.concat([part[0] for part in found], 1), xp.concat([part[1] for part in found], 1)


def _repeat(xp: Any, x: Array, times: int) -> Array:
    """Return ``[times, k]``: copies of an index ``[k]``."""
    return xp.concat([x.reshape([1, -1])] * times, 0)
