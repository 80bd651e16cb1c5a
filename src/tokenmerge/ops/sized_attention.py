"""Attention in which each key counts as often as its size says.

The logarithm of a key's size is added to its logits, so that the result is
``Σ s · exp(logit) · v / Σ s · exp(logit)``, summed over the keys with sizes s and values v. A mask does so,
and so do the functions here without one. ``sizes`` are those of the keys, ``[b, m]`` or ``[b · heads, m]``.
Tensors are ``[b, heads, n, d]`` as for PyTorch's attention, ``[b, n, heads, d]`` as for other kernels, or
``[b · heads, n, d]``. A kernel gets ``query``, ``key`` and ``value`` by name.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from tokenmerge.ops.once import once

_GROUP = 8  # kernels take head sizes that are multiples of this
# Kernels compute with at least this head size, so that columns which still fit cost nothing in the kernel.
_NARROWEST = 64
# The fewest keys for which columns are faster than a mask there. Recorded on an H200 and an H100 with heads
# of 40: a layer with a mask takes 0.9 to 0.95 times as long as with columns at 2048 keys, 1.3 times at 4608,
# and 1.4 times at 8192 (benchmarks/gpu_h200_b.jsonl, gpu_h200_c.jsonl, gpu_h100_b.jsonl; part "attention").
_KEYS_FOR_COLUMNS = 3072


class Bias(enum.Enum):
    """How attention learns the sizes of keys."""

    MASK = "mask"
    COLUMNS = "columns"  # attend_by_columns
    FLEX = "flex"  # attend_by_flex
    GROUPS = "groups"  # attend_by_groups


def choose_bias(device: str, dtype: torch.dtype, d: int, keys: int, has_mask: bool) -> Bias:
    """Choose the fastest way for a type of device, a dtype, heads of d channels and a number of keys.

    On CUDA in half precision, columns are faster where they fit in the narrowest head and there are many
    keys, by the records of an H200 and an H100. For heads of 64 and 128, the same records have a mask at 0.75
    to 0.92 of the time of columns. FlexAttention and groups were not measured on a GPU. They are not chosen:
    FlexAttention has to be compiled first, which takes seconds, and groups wait for the device, since their
    number depends on the plan. On a CPU, a mask takes 2 to 9 % longer than no
    bias, and each of the others longer (benchmarks/bias_cpu.jsonl). A host's own mask leads to the kernels
    with masks in any case.
    """
    if device != "cuda" or has_mask or dtype not in (torch.float16, torch.bfloat16):
        return Bias.MASK
    fits = head_size_with_columns(d) <= _NARROWEST
    return Bias.COLUMNS if fits and keys >= _KEYS_FOR_COLUMNS else Bias.MASK


def head_size_with_columns(d: int) -> int:
    """Return the head size of :func:`attend_by_columns` for d: the next multiple of 8 above it."""
    return (d // _GROUP + 1) * _GROUP


def attend_without_mask(
    way: Bias,
    kernel: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sizes: Tensor,
    scale: float | None = None,
) -> Tensor:
    """Compute attention in one of the ways without a mask, for ``[b, heads, n, d]``.

    The kernel is for columns.
    """
    if way is Bias.COLUMNS:
        return attend_by_columns(kernel, query, key, value, sizes, scale, heads_first=True)
    attend = attend_by_flex if way is Bias.FLEX else attend_by_groups
    return attend(query, key, value, sizes, scale)


def attend_by_columns(
    kernel: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sizes: Tensor,
    scale: float | None = None,
    heads_first: bool = False,
) -> Tensor:
    """Compute attention by one call of the kernel, with 1 to 8 more channels for each head.

    In these channels the query is 1, and the key holds equal parts of ``log(size) / scale``. Together they
    add ``log(size)`` to the logit. Equal parts keep the numbers small, which kernels that quantise keys need.
    The values get as many zeros, since most kernels take one head size for all three. The kernel also gets
    the keyword argument ``scale``, by default ``d ** -0.5``.
    """
    d = query.shape[-1]
    more = head_size_with_columns(d) - d
    scale = d**-0.5 if scale is None else scale
    parts = _of_each_key(sizes.log() / (scale * more), key, heads_first).to(key.dtype)
    result = kernel(
        query=F.pad(query, (0, more), value=1.0),
        key=torch.cat([key, parts.expand(*key.shape[:-1], more)], dim=-1),
        value=F.pad(value, (0, more)),
        scale=scale,
    )
    return result[..., : value.shape[-1]]


def attend_by_values(
    kernel: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, sizes: Tensor
) -> Tensor:
    """Compute attention by two calls of the kernel, for kernels that cannot take more channels for a head.

    In one call the values are multiplied by the sizes; in the other they are the sizes themselves. The result
    is the quotient of the two. It does not depend on the scale of the sizes, so they are first divided by the
    largest one, which keeps the products within half precision. This takes twice the time of plain attention.
    """
    shares = _of_each_key(sizes / sizes.amax(dim=-1, keepdim=True), value).to(value.dtype)
    counts = shares.expand_as(value).contiguous()
    return kernel(query=query, key=key, value=value * counts) / kernel(query=query, key=key, value=counts)


def attend_by_flex(
    query: Tensor, key: Tensor, value: Tensor, sizes: Tensor, scale: float | None = None
) -> Tensor:
    """Compute attention by PyTorch's FlexAttention, whose kernel reads ``log(size)``: ``[b, heads, n, d]``.

    On a CUDA device the kernel is compiled in the first call. Elsewhere the logits of all pairs are computed,
    which is exact and slow.
    """
    logarithms = sizes.log()

    def with_size(logit: Tensor, image: Tensor, head: Tensor, of_query: Tensor, of_key: Tensor) -> Tensor:
        return logit + logarithms[image, of_key]

    result: Tensor = _flex(query.device.type == "cuda")(query, key, value, score_mod=with_size, scale=scale)
    return result


@functools.cache
def _flex(compiled: bool) -> Callable[..., Tensor]:
    """Return FlexAttention. It is imported when it is needed, which takes a second."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if compiled else flex_attention  # type: ignore[return-value]


def attend_by_groups(
    query: Tensor, key: Tensor, value: Tensor, sizes: Tensor, scale: float | None = None
) -> Tensor:
    """Compute attention by one call of a fused kernel for the keys of each size: ``[b, heads, n, d]``.

    It has no gradients. Keys of one size need no bias. The results are weighted by the sums of exponentials
    that the kernel returns, times the size. Reading which sizes there are waits for the device, once for all
    calls with these sizes. Images whose sizes differ are computed one by one.

    Raises:
        NotImplementedError: on a device other than a CPU and CUDA, whose kernels return no such sums.
    """
    order, groups, counts = once(sizes, "groups", lambda: _groups(sizes))
    if counts is None:
        each = once(sizes, "images", lambda: [of_image.clone() for of_image in sizes.split(1)])
        images = zip(query.split(1), key.split(1), value.split(1), each, strict=True)
        return torch.cat([attend_by_groups(*image, scale=scale) for image in images])
    place = order[:, None, :, None].expand(key.shape)
    keys = key.gather(2, place).split(counts, dim=2)
    values = value.gather(2, place[..., :1].expand(value.shape)).split(counts, dim=2)
    found = [_with_log_sums(query, *run, scale=scale) for run in zip(keys, values, strict=True)]
    log_sums = torch.stack([log_sum for _, log_sum in found]) + groups.log().view(-1, 1, 1, 1)
    weights = log_sums.softmax(dim=0).unsqueeze(-1)
    total = weights.new_zeros(*query.shape[:-1], value.shape[-1])
    for (result, _), weight in zip(found, weights, strict=True):
        total.addcmul_(result.to(weight.dtype), weight)
    return total.to(query.dtype)


def _groups(sizes: Tensor) -> tuple[Tensor, Tensor, list[int] | None]:
    """Return the order of the keys by size, the sizes, and how many keys have each.

    The last is None if the images differ.
    """
    in_order, order = sizes.sort(dim=1)
    if len(sizes) > 1 and not torch.equal(in_order, in_order[0].expand_as(in_order)):
        return order, in_order, None
    groups, counts = in_order[0].unique_consecutive(return_counts=True)
    return order, groups, counts.tolist()


def _with_log_sums(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the result of fused attention, and the log-sum-exp of each query ``[b, heads, n]``."""
    kernels = torch.ops.aten
    device = query.device.type
    d = query.shape[-1]
    if device == "cpu":
        result, log_sum = kernels._scaled_dot_product_flash_attention_for_cpu(query, key, value, scale=scale)
        return result, log_sum
    if device != "cuda":
        raise NotImplementedError(f"attention on {device!r} returns no log-sum-exp; take a mask")
    if query.dtype == torch.float32:
        result, log_sum, *_ = kernels._scaled_dot_product_efficient_attention(
            query, key, value, None, True, scale=scale
        )
        return result, log_sum[..., : query.shape[2]]
    scale = d**-0.5 if scale is None else scale
    filled = [F.pad(part, (0, -d % _GROUP)) for part in (query, key, value)]
    result, log_sum, *_ = kernels._scaled_dot_product_flash_attention(*filled, scale=scale)
    return result[..., :d], log_sum


def _of_each_key(numbers: Tensor, key: Tensor, heads_first: bool = False) -> Tensor:
    """Add the axes of the keys: ``[b, m]`` → ``[b, m, 1]``, ``[b, m, 1, 1]`` or ``[b, 1, m, 1]``."""
    if key.ndim == 3:
        return numbers.unsqueeze(2)
    return numbers[:, None, :, None] if heads_first else numbers[:, :, None, None]
