"""A plan: the indices of one merge, computed once and used to merge and to unmerge."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tokenmerge.integrations.portable.arrays import Array, Arrays


class Plan(NamedTuple):
    """Which of n tokens become which of m = n − r merged tokens, for each of b images.

    The fields mean what they mean in ``tokenmerge.ops.IndexPlan``: indices point into the rows of
    ``[b * n, c]`` or ``[b * m, c]``.

    Attributes:
        keep: ``[b, m]`` row of the token that each merged token starts from and whose place it takes.
        sources: ``[b, r]`` rows of the tokens that merge into another one.
        targets: ``[b, r]`` merged rows that these go to.
        inverse: ``[b, n]`` merged row that holds each original token.
        sizes: ``[b, m]`` number of original tokens in each merged one, as float32.
    """

    keep: Array
    sources: Array
    targets: Array
    inverse: Array
    sizes: Array


def make_plan(xp: Arrays, src: np.ndarray, dst: np.ndarray, order: Array, nearest: Array, r: int) -> Plan:
    """Merge the r sources with the best edges, leave all other tokens alone.

    Args:
        xp: operations for ``order`` and ``nearest``.
        src: ``[s]`` indices of the sources.
        dst: ``[d]`` indices of the destinations.
        order: ``[b, s]`` positions in ``src``, the best edge first.
        nearest: ``[b, s]`` for each source the position in ``dst`` of its destination.
        r: number of tokens to remove, 0 ≤ r ≤ s.
    """
    (b, s), n = order.shape, len(src) + len(dst)
    m = n - r
    image = np.arange(b)[:, None]
    tokens, merged_tokens = xp.index(image * n, order), xp.index(image * m, order)

    # Merged sequence: the sources left alone, then the destinations.
    by_edge = xp.take(xp.index(src, order), order.reshape([-1])).reshape([b, s]) + tokens
    sources, alone = by_edge[:, :r], by_edge[:, r:]
    keep = xp.concat([alone, xp.repeat(xp.index(dst, order), b) + tokens], 1)
    targets = xp.take_along(nearest, order[:, :r]) + (s - r) + merged_tokens
    places = xp.concat([keep, sources], 1).reshape([-1])
    holders = xp.concat([xp.repeat(xp.index(np.arange(m), order), b) + merged_tokens, targets], 1)
    inverse = xp.put(xp.index(np.zeros(b * n, np.int64), order), places, holders.reshape([-1]))
    sizes = xp.add(xp.count([b * m], order), targets.reshape([-1]), xp.count([b * r], order))
    return Plan(keep, sources, targets, inverse.reshape([b, n]), sizes.reshape([b, m]))


def merge(xp: Arrays, plan: Plan, x: Array) -> Array:
    """Replace merged tokens by their mean, summed in float32 or better: ``[b, n, c]`` → ``[b, m, c]``."""
    b, n, c = x.shape
    rows = x.reshape([b * n, c])
    kept, moved = (xp.exact(xp.take(rows, index.reshape([-1]))) for index in (plan.keep, plan.sources))
    total = xp.add(kept, plan.targets.reshape([-1]), moved)
    mean = total / xp.as_type(plan.sizes, total).reshape([-1, 1])
    return xp.as_type(mean, x).reshape([b, -1, c])


def keep_destinations(xp: Arrays, plan: Plan, x: Array) -> Array:
    """Keep the tokens whose place merged ones take, and drop the others: ``[b, n, c]`` → ``[b, m, c]``."""
    return _rows(xp, x, plan.keep)


def unmerge(xp: Arrays, plan: Plan, y: Array) -> Array:
    """Give each token the result of the merged token that holds it: ``[b, m, c]`` → ``[b, n, c]``."""
    return _rows(xp, y, plan.inverse)


def repeated(xp: Arrays, plan: Plan, times: int) -> Plan:
    """The plan for ``times`` · b images: b that merge as this plan says, then b more, and so on."""
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


def _rows(xp: Arrays, x: Array, index: Array) -> Array:
    b, n, c = x.shape
    return xp.take(x.reshape([b * n, c]), index.reshape([-1])).reshape([b, -1, c])
