"""The device, dtype and width of a model, and inputs of zeros that fit them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tokenmerge.models.base import Block


def device_of(pipe_or_model: object, model: nn.Module) -> torch.device:
    """Return the device that a model runs on. The weights of an offloaded model are elsewhere."""
    device = getattr(pipe_or_model, "_execution_device", None) or next(model.parameters()).device
    if torch.device(device).type != "meta":
        return torch.device(device)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else accelerator


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype that a model computes in. float8 weights are only stored as such."""
    dtypes = (weight.dtype for weight in model.parameters())
    return next((dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize > 1), torch.bfloat16)


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


def blank(root: Any, batch: int) -> Callable[..., Tensor]:
    """Return a function that makes zeros ``[batch, *shape]`` on the device and in the dtype of a model."""
    first = next(root.parameters())
    # Models of diffusers keep some weights in float32, for example the first of Wan.
    dtype = getattr(root, "dtype", first.dtype)
    if not dtype.is_floating_point:  # weights that are only stored in integers
        dtype = dtype_of(root)
    return lambda *shape: torch.zeros(batch, *shape, device=first.device, dtype=dtype)


def full_mask(root: Any, batch: int, tokens: int) -> Tensor:
    """Return a mask ``[batch, tokens]`` of ones with values: models read the length of a text from it."""
    return torch.ones(batch, tokens, device=device_of_values(root), dtype=torch.bool)


def device_of_values(root: Any) -> torch.device:
    """Return the device for inputs whose values a model reads: the CPU for weights on the meta device."""
    device = next(root.parameters()).device
    return torch.device("cpu") if device.type == "meta" else device


def example_of(
    root: Any, example: Callable[..., dict[str, Any]], timestep: str = "timestep"
) -> Callable[..., dict[str, Any]]:
    """Add the timestep, and the guidance scale of a model that takes one, to the ``example`` of a call."""

    def arguments(height: int, width: int, batch: int, *references: Any) -> dict[str, Any]:
        given = {timestep: torch.full_like(blank(root, batch)(), 500)}
        if getattr(root.config, "guidance_embeds", False):
            given["guidance"] = torch.full_like(given[timestep], 3.5)
        return {**given, **example(root, height, width, batch, *references)}

    return arguments
