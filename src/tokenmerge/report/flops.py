"""Counting the operations of a model without its weights."""

from __future__ import annotations

import copy
from collections.abc import Collection
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from tokenmerge.runtime.patch import restore

__all__ = ["count_flops", "weightless"]

# What other software keeps on a module to wrap its calls, and with it the original or whole other models.
_WRAPPERS = ("forward", "_old_forward", "_hf_hook", "_diffusers_hook", "_compiled_call_impl")


def weightless(root: nn.Module, on_cpu: Collection[str] = ()) -> nn.Module:
    """An unpatched copy of a model whose parameters and buffers have shapes and no values.

    Args:
        root: the model.
        on_cpu: names of parameters that are zeros on the CPU in the copy.
    """
    memo: dict[int, Any] = {}
    for tensor in chain(root.parameters(), root.buffers()):
        # Types for storage alone, such as float8, are cast before they are computed with.
        dtype = torch.float32 if tensor.is_floating_point() and tensor.itemsize == 1 else tensor.dtype
        empty = torch.empty_like(tensor, device="meta", dtype=dtype)
        memo[id(tensor)] = nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty
    for name in on_cpu:
        parameter = root.get_parameter(name)
        memo[id(parameter)] = nn.Parameter(torch.zeros_like(parameter, device="cpu"), False)
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
    """FLOPs of one call, for every module by its path, which starts with the name of the root's class.

    The model may be one without weights. Arguments whose values it looks at, such as the mask of a text, then
    stay on the CPU.
    """
    with _ShapesWhereMixed(), FlopCounterMode(display=False) as counter:
        root(**arguments)
    return {path: sum(counts.values()) for path, counts in counter.get_flop_counts().items()}


class _ShapesWhereMixed(TorchDispatchMode):
    """Where tensors with values meet tensors without, takes the shapes of all of them alone."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        # Indices keep their values: a mask's say how many elements the result has.
        if func is not torch.ops.aten.index.Tensor and len({tensor.is_meta for tensor in tensors}) > 1:
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        return func(*args, **kwargs)
