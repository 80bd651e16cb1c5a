"""Stand-ins for attention kernels of accelerators, put into diffusers' table of back-ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName
from torch import Tensor

REGISTRY = attention_dispatch._AttentionBackendRegistry


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Attention by matrix products, so that it is not taken for PyTorch's fused attention."""
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1  # which kernels ask for
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    logits = query @ key.mT * scale
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    return (logits.softmax(-1) @ value).transpose(1, 2)


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    _parallel_config: object = None,
) -> Tensor:
    """Like FlashAttention, it takes no mask."""
    if attn_mask is not None:
        raise ValueError("`attn_mask` is not supported for flash-attn 2.")
    return attention(query, key, value, None, scale)


def flash_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    _parallel_config: object = None,
) -> Tensor:
    """Like FlashAttention for sequences of several lengths: masks only say which keys are padding."""
    if attn_mask is not None:
        attn_mask = attention_dispatch._normalize_attn_mask(attn_mask, len(query), key.shape[1])
        attn_mask = attn_mask[:, None, None]
    return attention(query, key, value, attn_mask, scale)


def sage(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    _parallel_config: object = None,
) -> Tensor:
    """Like SageAttention: it takes no mask, and at most 128 channels per head."""
    if attn_mask is not None:
        raise ValueError("`attn_mask` is not supported for sage attention")
    if query.shape[-1] > 128:
        raise ValueError(f"Unsupported head_dim: {query.shape[-1]}")
    return attention(query, key, value, None, scale)


KERNELS = {"flash": flash, "flash_varlen": flash_varlen, "sage": sage}


@contextmanager
def backend(name: str, kernel: Callable[..., Tensor] | None = None) -> Iterator[None]:
    """Within the context, diffusers' models run attention by this back-end, or by ``kernel`` in its place."""
    key, before = AttentionBackendName(name), REGISTRY._active_backend
    former = REGISTRY._backends[key], REGISTRY._constraints[key], REGISTRY._supported_arg_names[key]
    REGISTRY.register(key)(kernel or KERNELS.get(name) or former[0])
    REGISTRY.set_active_backend(key)
    try:
        yield
    finally:
        REGISTRY.set_active_backend(before)
        REGISTRY._backends[key], REGISTRY._constraints[key], REGISTRY._supported_arg_names[key] = former
