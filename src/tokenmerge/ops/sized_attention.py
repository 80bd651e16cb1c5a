"""Attention in which each key counts as often as its size says, with kernels that take no mask.

With a mask, the logarithm of a key's size is added to its logits, so that the result is
``Σ s · exp(logit) · v / Σ s · exp(logit)``, summed over the keys with sizes s and values v. The two functions
here compute the same without one. Tensors are ``[b, n, heads, d]`` or ``[b · heads, n, d]``, and ``sizes``
those of the keys, ``[b, m]`` or ``[b · heads, m]``. A kernel gets ``query``, ``key`` and ``value`` by name.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

_GROUP = 8  # kernels take head sizes that are multiples of this


def head_size_with_columns(d: int) -> int:
    """Return the head size of :func:`attend_by_columns` for d: the next multiple of 8 above it."""
    return (d // _GROUP + 1) * _GROUP


def attend_by_columns(
    kernel: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sizes: Tensor,
    scale: float | None = None,
) -> Tensor:
    """Attention by one call of the kernel, with 1 to 8 more channels for each head.

    In these channels the query is 1, and the key holds equal parts of ``log(size) / scale``. Together they
    add ``log(size)`` to the logit. Equal parts keep the numbers small, which kernels that quantise keys need.
    The values get as many zeros, since most kernels take one head size for all three. The kernel also gets
    the keyword argument ``scale``, by default ``d ** -0.5``.
    """
    d = query.shape[-1]
    more = head_size_with_columns(d) - d
    scale = d**-0.5 if scale is None else scale
    parts = _of_each_key(sizes.log() / (scale * more), key).to(key.dtype)
    result = kernel(
        query=F.pad(query, (0, more), value=1.0),
        key=torch.cat([key, parts.expand(*key.shape[:-1], more)], dim=-1),
        value=F.pad(value, (0, more)),
        scale=scale,
    )
    return result[..., :d]


def attend_by_values(
    kernel: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, sizes: Tensor
) -> Tensor:
    """Attention by two calls of the kernel, for kernels that cannot take more channels for a head.

    In one call the values are multiplied by the sizes; in the other they are the sizes themselves. The result
    is the quotient of the two. It does not depend on the scale of the sizes, so they are first divided by the
    largest one, which keeps the products within half precision. This takes twice the time of plain attention.
    """
    shares = _of_each_key(sizes / sizes.amax(dim=-1, keepdim=True), value).to(value.dtype)
    counts = shares.expand_as(value).contiguous()
    return kernel(query=query, key=key, value=value * counts) / kernel(query=query, key=key, value=counts)


def _of_each_key(numbers: Tensor, key: Tensor) -> Tensor:
    """``[b, m]`` → ``[b, m, 1]`` or ``[b, m, 1, 1]``: as many axes as the keys or values have."""
    return numbers.view(*numbers.shape, *[1] * (key.ndim - 2))
