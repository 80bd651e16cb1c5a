"""The ways of proportional attention: how the logarithm of a merged token's size gets to its logits.

Each takes ``query``, ``key`` and ``value`` ``[b, heads, n, d]`` and the ``sizes`` of the keys ``[b, m]``, and
computes ``Σ s · exp(logit) · v / Σ s · exp(logit)``. A better one takes the place of one here in ``BIASES``.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeAlias
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import flex_attention

from on_gpu.record import Facts
from tokenmerge.ops.once import once
from tokenmerge.ops.sized_attention import attend_by_columns
from tokenmerge.runtime.blocks.proportional_attention import ProportionalAttention

Bias: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# Each shape is a graph of its own, and there are more than PyTorch keeps by itself.
_SHAPES = 64


def by_mask(query: Tensor, key: Tensor, value: Tensor, sizes: Tensor) -> Tensor:
    """Add the logarithms as a mask."""
    mask = sizes.log().to(query.dtype)[:, None, None]
    return F.scaled_dot_product_attention(query, key, value, mask)


def by_columns(query: Tensor, key: Tensor, value: Tensor, sizes: Tensor) -> Tensor:
    """Write the logarithms into more channels of each head."""

    def kernel(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        q, k, v = (own.transpose(1, 2) for own in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)

    q, k, v = (own.transpose(1, 2) for own in (query, key, value))
    return attend_by_columns(kernel, q, k, v, sizes).transpose(1, 2)


def by_flex(query: Tensor, key: Tensor, value: Tensor, sizes: Tensor) -> Tensor:
    """Let FlexAttention read the logarithms. On a GPU it is compiled for each shape."""
    attend = _compiled() if query.device.type == "cuda" else _flex
    return attend(query, key, value, sizes.log())


def _flex(query: Tensor, key: Tensor, value: Tensor, logs: Tensor) -> Tensor:
    def add(score: Tensor, image: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return score + logs[image, column]

    return flex_attention.flex_attention(query, key, value, score_mod=add)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    torch._dynamo.config.recompile_limit = _SHAPES
    return torch.compile(_flex, dynamic=False)


def by_groups(query: Tensor, key: Tensor, value: Tensor, sizes: Tensor, cudnn: bool = False) -> Tensor:
    """Call a kernel for the keys of each size, and combine the results by the logarithm of their sums.

    The numbers of keys are read once for each plan, which waits for the device. cuDNN prepares its kernel for
    each number of keys, so it is left out in models, where the numbers differ from step to step.
    """
    order, counts = once(sizes, "sorted groups", functools.partial(sort_by_size, sizes))
    if counts is None:  # images whose groups differ
        alone = []
        for image in range(len(sizes)):
            q, k, v = (own[image].unsqueeze(0) for own in (query, key, value))
            alone.append(by_groups(q, k, v, sizes_of_image(sizes, image), cudnn))
        return torch.cat(alone)
    index = order[:, None, :, None].expand(-1, key.shape[1], -1, key.shape[-1])
    keys = key.gather(2, index)
    values = value.gather(2, index)
    lengths = [count for _, count in counts]
    results = []
    sums = []
    parts = zip(counts, keys.split(lengths, 2), values.split(lengths, 2), strict=True)
    for (size, _), own_keys, own_values in parts:
        result, logs = attend_with_sums(query, own_keys, own_values, cudnn)
        results.append(result)
        sums.append(logs + math.log(size))
    shares = torch.stack(sums).softmax(0).unsqueeze(-1)
    return (torch.stack(results) * shares).sum(0).to(query.dtype)


def sort_by_size(sizes: Tensor) -> tuple[Tensor, list[tuple[float, int]] | None]:
    """Return the order of the keys by size, and each size with its number of keys.

    The numbers are None if images differ.
    """
    ordered, order = sizes.sort(dim=1, stable=True)
    rows = ordered.tolist()
    if any(row != rows[0] for row in rows):
        return order, None
    return order, sorted(Counter(rows[0]).items())


def sizes_of_image(sizes: Tensor, image: int) -> Tensor:
    """Return the sizes of one image, the same tensor in each call."""
    return once(sizes, ("image", image), lambda: sizes[image].unsqueeze(0))


def attend_with_sums(query: Tensor, key: Tensor, value: Tensor, cudnn: bool) -> tuple[Tensor, Tensor]:
    """Return fused attention, and the logarithm of the sum of its exponentials ``[b, heads, n]``.

    On a GPU the kernel is that of flash attention or of cuDNN.
    """
    aten = torch.ops.aten
    if query.device.type == "cpu":
        result, sums = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
        return result, sums
    if cudnn:
        made = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True)
    else:
        made = aten._scaled_dot_product_flash_attention(query, key, value)
    return made[0], made[1].reshape(query.shape[:-1])


BIASES: dict[str, Bias] = {
    "mask": by_mask,
    "columns": by_columns,
    "FlexAttention": by_flex,
    "sorted groups": by_groups,
}


@contextlib.contextmanager
def using(name: str) -> Iterator[None]:
    """Let proportional attention of patched models be computed in one way.

    Raises:
        RuntimeError: on leaving the context, if no attention was proportional.
    """
    calls = Counter[str]()

    def attend(self: ProportionalAttention, attention: Callable[..., Tensor], given: Facts) -> Tensor:
        if given.get("attn_mask") is not None:
            raise RuntimeError("attention that has a mask of its own is not measured here")
        sizes = self._sizes_of(len(given["key"]), given["key"].shape[-2])
        if sizes is None:
            return attention(**given)
        calls[name] += 1
        return BIASES[name](given["query"], given["key"], given["value"], sizes)

    with mock.patch.object(ProportionalAttention, "attend_fused", attend):
        yield
    if not calls:
        raise RuntimeError(f"no attention asked for its bias, so it was not computed by {name}")
