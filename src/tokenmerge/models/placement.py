"""The device, dtype and width of a model, and inputs of zeros that fit them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeGuard

import torch
from torch import nn

from tokenmerge.models.base import Block


def device_of(pipe_or_model: object, model: nn.Module) -> torch.device:
    """Return the device that a model runs on. The weights of an offloaded model are elsewhere."""
    device = getattr(pipe_or_model, "_execution_device", None) or next(model.parameters()).device
    if torch.device(device).type != "meta":
        return torch.device(device)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else accelerator


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype that a model computes in.

    Models of diffusers know it. They keep some weights in float32, for example the first of Wan, and may only
    store others in float8 or in integers.
    """
    dtypes = (getattr(model, "dtype", None), *(weight.dtype for weight in model.parameters()))
    return next((dtype for dtype in dtypes if _computes(dtype)), torch.bfloat16)


def _computes(dtype: object) -> TypeGuard[torch.dtype]:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1


def narrowest_attention(blocks: Sequence[Block]) -> tuple[int, ...]:
    """Return the same as :func:`narrowest` for the attention in blocks of diffusers."""
    found = ((_width(block), block.plan_group) for block in blocks)
    return narrowest((width, group) for width, group in found if width is not None)


def narrowest(attention: Iterable[tuple[tuple[int, int], Hashable]]) -> tuple[int, ...]:
    """Return the width of the narrowest attention, and how many of its blocks share a plan.

    Merging saves least there.

    Args:
        attention: for each block, channels and heads of its attention, and what it has in common with the
            blocks that can share its plan.

    Returns:
        Channels, heads, and the mean number of blocks, rounded down. Empty if there is no attention.
    """
    groups = Counter(attention)
    found = min((width for width, _ in groups), default=None)
    if found is None:
        return ()
    blocks = [number for (width, _), number in groups.items() if width == found]
    return *found, sum(blocks) // len(blocks)


def _width(block: Block) -> tuple[int, int] | None:
    """Return channels and heads of a block's narrowest attention; None if they are unknown."""
    found = []
    for layer in (getattr(block.module, layer.name) for layer in block.layers):
        projection, heads = getattr(layer, "to_q", None), getattr(layer, "heads", None)
        if isinstance(projection, nn.Linear) and isinstance(heads, int):
            found.append((projection.out_features, heads))
    return min(found, default=None)
