"""Where a model runs: its device, its dtype, the width of its attention, and its part of the tokens."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import Block, is_a


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
    known = (dtype for dtype in dtypes if isinstance(dtype, torch.dtype))
    return next((dtype for dtype in known if dtype.is_floating_point and dtype.itemsize > 1), torch.bfloat16)


def narrowest_attention(blocks: Sequence[Block]) -> tuple[int, ...]:
    """Return the same as :func:`narrowest` for the attention in blocks of diffusers."""
    attention = []
    for block in blocks:
        widths = _widths(block)
        if widths:
            attention.append((min(widths), block.plan_group))
    return narrowest(attention)


def narrowest(attention: Iterable[tuple[tuple[int, int], Hashable]]) -> tuple[int, ...]:
    """Return channels and heads of the narrowest attention, and how many blocks share its plan on average.

    Merging saves least there. The result is empty if there is no ``attention``, which has channels and heads
    for each block, and a key that is the same in all blocks that can share its plan.
    """
    groups = Counter(attention)
    if not groups:
        return ()
    narrow = min(width for width, _ in groups)
    blocks = [number for (width, _), number in groups.items() if width == narrow]
    return *narrow, sum(blocks) // len(blocks)


def _widths(block: Block) -> list[tuple[int, int]]:
    """Return channels and heads of the attention in a block, where they are known."""
    found = []
    for layer in (getattr(block.module, layer.name) for layer in block.layers):
        projection = getattr(layer, "to_q", None)
        heads = getattr(layer, "heads", None)
        if isinstance(projection, nn.Linear) and isinstance(heads, int):
            found.append((projection.out_features, heads))
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """The part of each sequence that a process has in diffusers' context parallelism."""

    index: int  # 0 ≤ index < parts
    parts: int  # one for each device
    group: Any  # of the processes that have them

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over the processes; each has to call this."""
        total = tensor.clone()
        torch.distributed.all_reduce(total, group=self.group)
        return total


def shard_of(root: nn.Module) -> Shard | None:
    """Return the part of the tokens of the blocks that this process has, or None if it has all of them.

    Tensor parallelism splits weights and leaves all tokens to each process.
    """
    config = getattr(getattr(root, "_parallel_config", None), "context_parallel_config", None)
    if config is None:
        return None
    if getattr(root, "_cp_plan", None) is None:
        raise UnsupportedModelError(
            f"tokens cannot be merged in {type(root).__name__} under context parallelism: its class has no "
            "_cp_plan, which says where its tokens are split between devices; load the model again without "
            "enable_parallelism()"
        )
    group = config._flattened_mesh.get_group()
    return Shard(torch.distributed.get_rank(group), config._flattened_mesh.size(), group)


def splits_tokens(module: nn.Module) -> bool:
    """Return whether a hook of diffusers at this module gives it a part of its tokens."""
    hooks = getattr(module.__dict__.get("_diffusers_hook"), "hooks", {})
    return any(
        is_a(hook, "ContextParallelSplitHook") and "hidden_states" in hook.metadata for hook in hooks.values()
    )
