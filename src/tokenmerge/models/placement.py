"""A model's device, dtype and width of attention, on which the time of merging depends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tokenmerge.models.base import Block


def device_of(pipe_or_model: object, model: nn.Module) -> torch.device:
    """The device that a model runs on. The weights of an offloaded model are elsewhere."""
    device = getattr(pipe_or_model, "_execution_device", None) or next(model.parameters()).device
    if torch.device(device).type != "meta":
        return torch.device(device)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else accelerator


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype that a model computes in. float8 weights are only stored as such."""
    dtypes = (weight.dtype for weight in model.parameters())
    return next((dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize > 1), torch.bfloat16)


def narrowest_attention(blocks: Sequence[Block]) -> tuple[int, ...]:
    """Channels and heads of the narrowest attention, where merging saves least; empty if unknown."""
    found = []
    for layer in (getattr(block.module, layer.name) for block in blocks for layer in block.layers):
        projection, heads = getattr(layer, "to_q", None), getattr(layer, "heads", None)
        if isinstance(projection, nn.Linear) and isinstance(heads, int):
            found.append((projection.out_features, heads))
    return min(found, default=())
