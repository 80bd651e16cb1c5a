"""Token merging for array libraries other than PyTorch: the counterpart of ``tokenmerge.ops``.

It needs only NumPy. Functions mean what those of the same names in ``tokenmerge.ops`` and
``tokenmerge.planners`` mean, and tests compare their plans on the same arrays. ``xp`` is the module
``paddle``, or one that has its functions for the arrays of another library. Indices alone have no gradients.
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
    """Return read-only indices of sources and destinations, as ``ops.partition.strided_partition`` does.

    The two numbers of a draw are the seed and the step of :func:`step_number`.

    >>> src, dst = partition((2, 5), (2, 2))
    >>> dst.tolist(), src.tolist()
    ([0, 2], [1, 3, 5, 7, 6, 8, 4, 9])
    """
    height, width = cell
    rows = grid[0] // height
    columns = grid[1] // width
    tokens = np.arange(grid[0] * grid[1], dtype=np.int64).reshape(grid)
    # [k, d]: by position within the cell, and by cell.
    cells = tokens[: rows * height, : columns * width].reshape(rows, height, columns, width)
    inside = cells.transpose(1, 3, 0, 2).reshape(height * width, rows * columns)
    outside = [tokens[: rows * height, columns * width :].ravel(), tokens[rows * height :].ravel()]
    if draw is not None:
        # The destination comes first; the others follow it round the cell.
        first = _hash(*draw, np.arange(rows * columns, dtype=np.int64)) * len(inside) >> 32
        inside = np.take_along_axis(inside, (np.arange(len(inside))[:, None] + first) % len(inside), axis=0)
    src = np.concatenate([inside[1:].ravel(), *outside])
    dst = inside[0].copy()
    src.flags.writeable = False
    dst.flags.writeable = False
    return src, dst


def own_cell(grid: tuple[int, int], cell: tuple[int, int], tokens: np.ndarray) -> np.ndarray:
    """Return the cell of each token, in row order. Beyond the last whole cell, it is the nearest one.

    >>> own_cell((3, 4), (2, 2), np.array([0, 3, 6, 11])).tolist()
    [0, 1, 1, 1]
    """
    rows = grid[0] // cell[0]
    columns = grid[1] // cell[1]
    row = np.minimum(tokens // grid[1] // cell[0], rows - 1)
    column = np.minimum(tokens % grid[1] // cell[1], columns - 1)
    return row * columns + column


def _hash(seed: int, step: int, place: np.ndarray) -> np.ndarray:
    """Make 32-bit integers from three counters, as ``hash_of`` of ``tokenmerge.ops.pytorch_arithmetic``."""
    first = _avalanche(np.array(seed & _MASK32, dtype=np.int64))
    of_step = (step * 0x9E3779B4 + 1) & _MASK32
    return _avalanche(place.astype(np.int64) ^ first) * of_step & _MASK32


def _avalanche(state: np.ndarray) -> np.ndarray:
    # Products of int64 wrap around, which leaves their lower 32 bits right.
    state = (state ^ (state >> 16)) * 0x7FEB352D & _MASK32
    state = (state ^ (state >> 15)) * 0x846CA68B & _MASK32
    return state ^ (state >> 16)


class MergePlan(NamedTuple):
    """A plan that merges n tokens into m = n − r: see ``tokenmerge.ops.plan.MergePlan``."""

    keep: Array
    sources: Array
    targets: Array
    inverse: Array
    sizes: Array


def num_removed(grid: tuple[int, int], settings: MergeSettings) -> int:
    """Return the number of tokens removed: ratio · n, rounded down, but ``"uniform"`` removes each source."""
    n = grid[0] * grid[1]
    cells = (grid[0] // settings.sy) * (grid[1] // settings.sx)
    r = settings.removed_of(n) if cells and n >= settings.min_tokens else 0
    return n - cells if r and settings.planner == "uniform" else r


def plan_tokens(
    xp: Any, features: Array, grid: tuple[int, int], settings: MergeSettings, step: int, parts: int = 1
) -> MergePlan | None:
    """Plan one merge: partition, match, and keep the r best edges.

    The result is None if no token would be removed. Features ``[b, n, c]`` are the input of a block, whose n
    tokens have a grid of (rows, columns), the columns fastest. The step is a :func:`step_number`. ``parts``
    images, b / ``parts`` apart, share a plan: one for each prompt of guidance.
    """
    r = num_removed(grid, settings)
    cell = (settings.sy, settings.sx)
    if r == 0:
        return None
    src, dst = partition(grid, cell, None if settings.seed is None else (settings.seed, step))
    if settings.planner == "tome":
        compared = shared_features(xp, features, parts) if parts > 1 else features
        order, nearest = bipartite_soft_matching(xp, compared, src, dst)
        if parts > 1:
            order = xp.concat([order] * parts, 0)
            nearest = xp.concat([nearest] * parts, 0)
    else:
        images = (features.shape[0], 1)
        order = _index(xp, np.tile(np.arange(len(src)), images), features)
        nearest = _index(xp, np.tile(own_cell(grid, cell, src), images), features)
    return make_plan(xp, src, dst, order, nearest, r)


def bipartite_soft_matching(
    xp: Any, features: Array, src: np.ndarray, dst: np.ndarray
) -> tuple[Array, Array]:
    """Return places in ``src``, the most similar first, and the nearest destination of each source."""
    sources = _select(xp, features, src)
    destinations = _select(xp, features, dst)
    product, nearest = _best(xp, sources, destinations / _length(xp, destinations))
    # The length of a source does not change which destination is nearest, so it divides last and once.
    similarity = product / _length(xp, sources)[..., 0]
    return xp.argsort(similarity, axis=-1, descending=True, stable=True), nearest


def shared_features(xp: Any, features: Array, parts: int) -> Array:
    """Make features by which ``parts`` images get one plan: ``[parts * b, n, c]`` → ``[b, n, parts * c]``."""
    _, n, c = features.shape
    unit = (features / _length(xp, features)).reshape([parts, -1, n, c])
    return unit.transpose([1, 2, 0, 3]).reshape([-1, n, parts * c])


def make_plan(xp: Any, src: np.ndarray, dst: np.ndarray, order: Array, nearest: Array, r: int) -> MergePlan:
    """Return the plan that merges the r sources with the best edges, and leaves all other tokens alone."""
    b, s = order.shape
    n = len(src) + len(dst)
    m = n - r
    image = np.arange(b)[:, None]
    # Merged sequence: the sources left alone, then the destinations.
    by_edge = xp.take_along_axis(_index(xp, src + image * n, order), order, axis=1)
    sources = by_edge[:, :r]
    keep = xp.concat([by_edge[:, r:], _index(xp, dst + image * n, order)], 1)
    targets = xp.take_along_axis(nearest, order[:, :r], axis=1) + _index(xp, image * m + (s - r), order)
    places = xp.concat([keep, sources], 1).reshape([-1])
    holders = xp.concat([_index(xp, np.arange(m) + image * m, order), targets], 1).reshape([-1])
    inverse = xp.scatter(_index(xp, np.zeros(b * n), order), places, holders)
    sizes = xp.index_add(xp.ones([b * m], "float32"), targets.reshape([-1]), 0, xp.ones([b * r], "float32"))
    return MergePlan(keep, sources, targets, inverse.reshape([b, n]), sizes.reshape([b, m]))


def merge(xp: Any, plan: MergePlan, x: Array) -> Array:
    """Replace merged tokens by their mean, summed in float32 or better: ``[b, n, c]`` → ``[b, m, c]``."""
    b, _, c = x.shape
    kept = _exact(xp, _rows(xp, x, plan.keep)).reshape([-1, c])
    moved = _exact(xp, _rows(xp, x, plan.sources)).reshape([-1, c])
    total = xp.index_add(kept, plan.targets.reshape([-1]), 0, moved)
    mean = total / xp.cast(plan.sizes, total.dtype).reshape([-1, 1])
    return (mean if mean.dtype == x.dtype else xp.cast(mean, x.dtype)).reshape([b, -1, c])


def keep_destinations(xp: Any, plan: MergePlan, x: Array) -> Array:
    """Keep the tokens whose place merged ones take, and drop the others: ``[b, n, c]`` → ``[b, m, c]``."""
    return _rows(xp, x, plan.keep)


def unmerge(xp: Any, plan: MergePlan, y: Array) -> Array:
    """Give each token the result of the merged token that holds it: ``[b, m, c]`` → ``[b, n, c]``."""
    return _rows(xp, y, plan.inverse)


def _index(xp: Any, values: np.ndarray, like: Array) -> Array:
    """Return indices computed with NumPy, on the device of ``like``. Arrays of NumPy are on none."""
    return xp.to_tensor(values, dtype="int64", place=getattr(like, "place", None))


def _rows(xp: Any, x: Array, index: Array) -> Array:
    """Select tokens by their rows ``[b, k]`` in the whole batch: ``[b, n, c]`` → ``[b, k, c]``."""
    b, n, c = x.shape
    return xp.gather(x.reshape([b * n, c]), index.reshape([-1])).reshape([b, -1, c])


def _select(xp: Any, x: Array, index: np.ndarray) -> Array:
    """Select tokens of all images by one index: ``[b, n, c]`` → ``[b, k, c]``."""
    b, n, _ = x.shape
    return _rows(xp, x, _index(xp, np.arange(b)[:, None] * n + index, x))


def _exact(xp: Any, x: Array) -> Array:
    """Return an array in float32 if it has half precision, or unchanged."""
    return xp.cast(x, "float32") if x.dtype in (xp.float16, xp.bfloat16) else x


def _length(xp: Any, x: Array) -> Array:
    """Return the Euclidean norm along the last axis, of size 1. 0 becomes the smallest normal number."""
    smallest = float(np.finfo(np.float16 if x.dtype == xp.float16 else np.float32).tiny)
    squares = _exact(xp, x)
    # Several times as fast on a CPU as paddle.linalg.norm.
    length = xp.sqrt(xp.sum(squares * squares, axis=-1, keepdim=True))
    return xp.cast(xp.clip(length, min=smallest), x.dtype)


def _best(xp: Any, sources: Array, destinations: Array) -> tuple[Array, Array]:
    """Return each source's largest product with a destination, and the first index of it: ``[b, s]`` each."""
    b, d, _ = destinations.shape
    columns = destinations.transpose([0, 2, 1])
    step = max(1, _SIMILARITIES_AT_ONCE // (b * d))
    slices = (sources[:, start : start + step] @ columns for start in range(0, sources.shape[1], step))
    found = [(xp.max(part, axis=-1), xp.argmax(part, axis=-1)) for part in slices]
    if len(found) == 1:
        return found[0]
    products, nearest = zip(*found, strict=True)
    return xp.concat(products, 1), xp.concat(nearest, 1)
