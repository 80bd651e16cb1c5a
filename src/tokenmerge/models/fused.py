"""Which attention can count a merged token as often as the tokens it stands for: fused attention."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

# Functions that run fused attention, of PyTorch or other kernels, called by the model or by its processor in
# diffusers.
_FUSED = {"scaled_dot_product_attention", "dispatch_attention_fn", "memory_efficient_attention"}


def is_fused(attention: nn.Module) -> bool:
    """Return whether a layer, or its processor, runs fused attention."""
    processor = getattr(attention, "processor", None)
    return _calls_fused(type(attention).forward if processor is None else type(processor).__call__)


@functools.lru_cache(maxsize=128)
def _calls_fused(function: Callable[..., Any]) -> bool:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and not _FUSED.isdisjoint(code.co_names)


def splits_attention(pipe: object) -> bool:
    """Return whether a pipeline perturbs attention: its processors attend to each half of a batch apart.

    It sets them when its call begins.
    """
    return hasattr(pipe, "pag_applied_layers")
