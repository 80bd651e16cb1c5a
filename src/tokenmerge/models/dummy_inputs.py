"""Inputs without content, of the shapes that a model is called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["blank", "device_of_values", "full_mask"]


def blank(root: Any, batch: int) -> Callable[..., Tensor]:
    """A maker of zeros ``[batch, *shape]`` on the device and of the type of a model's weights."""
    first = next(root.parameters())
    # Models of diffusers keep some weights in float32 beside those of a lower type, as Wan its first.
    dtype = getattr(root, "dtype", first.dtype)
    return lambda *shape: torch.zeros(batch, *shape, device=first.device, dtype=dtype)


def full_mask(root: Any, batch: int, tokens: int) -> Tensor:
    """A mask ``[batch, tokens]`` that hides nothing, with values: models look at how long a text is."""
    return torch.ones(batch, tokens, device=device_of_values(root), dtype=torch.bool)


def device_of_values(root: Any) -> torch.device:
    """Where to put inputs whose values a model looks at: on the CPU, where its weights have none."""
    device = next(root.parameters()).device
    return torch.device("cpu") if device.type == "meta" else device
