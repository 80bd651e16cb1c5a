"""Attention to keys of several sizes without a mask: equal to attention with one, up to rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tokenmerge.ops import sized_attention
from tokenmerge.ops.sized_attention import (
    Bias,
    attend_by_columns,
    attend_by_flex,
    attend_by_groups,
    attend_by_values,
    choose_bias,
    head_size_with_columns,
)

LARGEST = 16  # size of a key
HUGE = 4000  # size of a key that stands for nearly all tokens of a large image


def plain(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """A kernel without masks that takes ``[b, n, heads, d]``, or ``[b · heads, n, d]``."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    if query.ndim == 3:
        return F.scaled_dot_product_attention(query, key, value, scale=scale)
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, scale=scale).transpose(1, 2)


def case(
    d: int, dtype: torch.dtype, folded: bool, largest: int = LARGEST
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and sizes of keys. Some keys count once, as text does."""
    draw = torch.Generator().manual_seed(d)
    shape = (6, 33, d) if folded else (2, 33, 3, d)
    query, key, value = (torch.randn(shape, generator=draw).to(dtype) for _ in range(3))
    sizes = torch.randint(1, largest + 1, (shape[0], 33), generator=draw).float()
    sizes[:, :7] = 1
    return query, key, value, sizes


def exact(query: Tensor, key: Tensor, value: Tensor, sizes: Tensor, scale: float) -> Tensor:
    """``Σ s · exp(logit) · v / Σ s · exp(logit)`` in float64."""
    query, key, value = (
        t.double() if t.ndim == 3 else t.double().transpose(1, 2) for t in (query, key, value)
    )
    weights = (query @ key.mT * scale).exp() * sizes.double().view(len(sizes), *[1] * (key.ndim - 2), -1)
    result = weights @ value / weights.sum(-1, keepdim=True)
    return result if query.ndim == 3 else result.transpose(1, 2)


def bound(query: Tensor, key: Tensor, value: Tensor, scale: float, largest: int = LARGEST) -> float:
    """How far the result may be from the exact one.

    A logit is off by the rounding of log(size), half an ulp of the dtype, and by the rounding of its sum of
    d + 8 products in float32. An error δ of the logits changes each weight by a factor within exp(±δ), before
    and after the sum of weights: 2δ of the largest value. Weights, sizes times values, and results are
    rounded to the dtype, each by half an ulp. The quotient of two results has the errors of both.
    """
    half_ulp = torch.finfo(query.dtype).eps / 2
    products = query.float().norm(dim=-1).max() * key.float().norm(dim=-1).max() * scale
    logit = half_ulp * torch.tensor(largest).log() + 2**-24 * (query.shape[-1] + 8) * products
    return float(value.float().abs().max() * (2 * logit + 6 * half_ulp))


CASES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
HEADS = pytest.mark.parametrize("d", [40, 64, 71, 72, 80, 96, 120, 128])


@HEADS
@CASES
@pytest.mark.parametrize("attend", [attend_by_columns, attend_by_values])
@pytest.mark.parametrize("folded", [False, True], ids=["heads", "folded"])
def test_each_key_counts_as_often_as_its_size_says(attend, d, dtype, folded):
    query, key, value, sizes = case(d, dtype, folded)
    result = attend(plain, query, key, value, sizes)
    assert result.dtype == dtype
    error = (result - exact(query, key, value, sizes, d**-0.5)).abs().max().item()
    assert error < bound(query, key, value, d**-0.5)


def by_columns(
    query: Tensor, key: Tensor, value: Tensor, sizes: Tensor, scale: float | None = None
) -> Tensor:
    kernel = F.scaled_dot_product_attention
    return attend_by_columns(kernel, query, key, value, sizes, scale, heads_first=True)


def by_mask(query: Tensor, key: Tensor, value: Tensor, sizes: Tensor, scale: float | None = None) -> Tensor:
    mask = sizes.log().to(query.dtype)[:, None, None]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


OF_FUSED = {
    Bias.MASK: by_mask,
    Bias.COLUMNS: by_columns,
    Bias.FLEX: attend_by_flex,
    Bias.GROUPS: attend_by_groups,
}


@CASES
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("d", [40, 64, 128])
@pytest.mark.parametrize("way", Bias)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_each_way_of_fused_attention_is_right_to_rounding(way, d, scale, dtype):
    """The images of the batch have other sizes, and some keys count once, as text does."""
    query, key, value, sizes = case(d, dtype, folded=False)
    assert not torch.equal(sizes[0].sort().values, sizes[1].sort().values)
    heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
    result = OF_FUSED[way](*heads_first, sizes, scale).transpose(1, 2)
    assert result.dtype == dtype
    used = d**-0.5 if scale is None else scale
    error = (result - exact(query, key, value, sizes, used)).abs().max().item()
    assert error < bound(query, key, value, used)


@pytest.mark.parametrize("way", Bias)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_images_with_equal_sizes_and_fewer_queries_than_keys(way):
    query, key, value, sizes = case(64, torch.float32, folded=False)
    query, sizes = query[:, :5], sizes[:1].repeat(2, 1)
    heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
    result = OF_FUSED[way](*heads_first, sizes).transpose(1, 2)
    error = (result - exact(query, key, value, sizes, 64**-0.5)).abs().max().item()
    assert error < bound(query, key, value, 64**-0.5)


def test_groups_are_refused_where_no_kernel_returns_sums():
    heads = [torch.empty(1, 2, 8, 16, device="meta") for _ in range(3)]
    with pytest.raises(NotImplementedError, match="'meta' returns no log-sum-exp"):
        sized_attention._with_log_sums(*heads)


HALF = torch.bfloat16


@pytest.mark.parametrize(
    ("device", "dtype", "d", "keys", "has_mask", "expected"),
    [
        ("cpu", torch.float32, 40, 4096, False, Bias.MASK),
        ("mps", torch.float16, 40, 4096, False, Bias.MASK),
        ("cuda", torch.float16, 40, 4096, False, Bias.COLUMNS),
        ("cuda", HALF, 40, 8192, False, Bias.COLUMNS),
        ("cuda", HALF, 40, 2048, False, Bias.MASK),
        ("cuda", HALF, 40, 8192, True, Bias.MASK),
        ("cuda", torch.float32, 40, 8192, False, Bias.MASK),
        ("cuda", HALF, 64, 16384, False, Bias.MASK),
        ("cuda", HALF, 128, 16384, False, Bias.MASK),
    ],
)
def test_the_way_that_the_records_have_as_the_fastest_is_chosen(device, dtype, d, keys, has_mask, expected):
    assert choose_bias(device, dtype, d, keys, has_mask) is expected


@CASES
@pytest.mark.parametrize("attend", [attend_by_columns, attend_by_values])
def test_the_products_of_huge_sizes_and_large_values_stay_in_range(attend, dtype):
    """Sizes times values would be up to 300,000, where float16 ends at 65,504."""
    query, key, value, sizes = case(128, dtype, folded=False, largest=HUGE)
    value = value * 20
    result = attend(plain, query, key, value, sizes)
    error = (result - exact(query, key, value, sizes, 128**-0.5)).abs().max().item()
    assert error < bound(query, key, value, 128**-0.5, HUGE)


@HEADS
@CASES
def test_columns_are_as_exact_as_a_mask(d, dtype):
    query, key, value, sizes = case(d, dtype, folded=False)
    within = bound(query, key, value, d**-0.5)
    mask = sizes.log().to(dtype).view(2, 1, 1, -1)
    heads = (tensor.transpose(1, 2) for tensor in (query, key, value))
    masked = F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2)
    columns = attend_by_columns(plain, query, key, value, sizes)
    assert (columns - masked).abs().max().item() < 2 * within  # each is within this bound of the exact result


def test_a_scale_that_is_given_is_kept():
    query, key, value, sizes = case(64, torch.float32, folded=False)
    result = attend_by_columns(plain, query, key, value, sizes, scale=0.3)
    error = (result - exact(query, key, value, sizes, 0.3)).abs().max().item()
    assert error < bound(query, key, value, 0.3)


@HEADS
def test_a_kernel_gets_a_multiple_of_8_channels_and_values_of_the_same_size(d):
    seen = []

    def kernel(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        seen.extend(tensor.shape[-1] for tensor in (query, key, value))
        assert scale == d**-0.5
        return value

    result = attend_by_columns(kernel, *case(d, torch.float32, folded=False))
    assert result.shape[-1] == d
    assert set(seen) == {head_size_with_columns(d)}
    assert d < head_size_with_columns(d) <= d + 8
    assert head_size_with_columns(d) % 8 == 0


def test_keys_stay_small_where_the_padding_has_room():
    """Kernels that quantise keys to 8 bits take their steps from the largest number of a key."""
    query, key, value, sizes = case(128, torch.float32, folded=False)
    largest = []

    def kernel(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        largest.append(key[..., 128:].abs().max().item())
        return value

    attend_by_columns(kernel, query, key, value, sizes)
    # An eighth of log(16) · √128, no larger than usual entries of keys with variance 1.
    assert largest[0] <= torch.tensor(16.0).log().item() * 128**0.5 / 8 + 1e-5 < 4
