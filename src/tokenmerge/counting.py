"""Counting the operations of a model without its weights."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tokenmerge.patch import restore

__all__ = ["count_flops", "weightless"]

# What other software keeps on a module to wrap its calls, and with it the original or whole other models.
_WRAPPERS = ("forward", "_old_forward", "_hf_hook", "_diffusers_hook", "_compiled_call_impl")


def weightless(root: nn.Module) -> nn.Module:
    """An unpatched copy of a model whose parameters and buffers have shapes and no values."""
    memo: dict[int, Any] = {}
    for tensor in chain(root.parameters(), root.buffers()):
        # Types for storage alone, such as float8, are cast before they are computed with.
        dtype = torch.float32 if tensor.is_floating_point() and tensor.itemsize == 1 else tensor.dtype
        empty = torch.empty_like(tensor, device="meta", dtype=dtype)
        memo[id(tensor)] = nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty
    for module in root.modules():
        memo |= {id(module.__dict__[name]): None for name in _WRAPPERS if name in module.__dict__}
    copied = copy.deepcopy(root, memo)
    restore(copied)
    for module in copied.modules():
        for name in _WRAPPERS:
            module.__dict__.pop(name, None)
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return copied


@torch.no_grad()
def count_flops(root: nn.Module, arguments: dict[str, Any]) -> dict[str, int]:
    """FLOPs of one call, for every module by its path, which starts with the name of the root's class."""
    with FlopCounterMode(display=False) as counter:
        root(**arguments)
    return {path: sum(counts.values()) for path, counts in counter.get_flop_counts().items()}
