"""Inputs of zeros, with the shapes that a model is called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def blank(root: Any, batch: int) -> Callable[..., Tensor]:
    """A function that makes zeros ``[batch, *shape]`` with the device and dtype of a model's weights."""
    first = next(root.parameters())
    # Models of diffusers keep some weights in float32, for example the first of Wan.
    dtype = getattr(root, "dtype", first.dtype)
    return lambda *shape: torch.zeros(batch, *shape, device=first.device, dtype=dtype)


def full_mask(root: Any, batch: int, tokens: int) -> Tensor:
    """A mask ``[batch, tokens]`` of ones. It always has values: models read the length of a text from it."""
    return torch.ones(batch, tokens, device=device_of_values(root), dtype=torch.bool)


def device_of_values(root: Any) -> torch.device:
    """Device for inputs whose values the model reads: that of its weights, or the CPU for the meta device."""
    device = next(root.parameters()).device
    return torch.device("cpu") if device.type == "meta" else device
