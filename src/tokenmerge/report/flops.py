"""Counts the operations of a model without its weights."""

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

# Attributes by which other libraries wrap a module's calls. They may hold references to whole other models.
_WRAPPERS = ("forward", "_old_forward", "_hf_hook", "_diffusers_hook", "_compiled_call_impl")


def weightless(root: nn.Module, on_cpu: Collection[str] = ()) -> nn.Module:
    """An unpatched copy of a model on the meta device: its parameters and buffers have no values.

    The parameters named in ``on_cpu`` become zeros on the CPU instead.
    """
    memo: dict[int, Any] = {}
    for tensor in chain(root.parameters(), root.buffers()):
        # Dtypes that are only for storage, such as float8, are cast before computing.
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
    """Count the FLOPs of one call for every module, by its path, which starts with the class of the root.

    The model may be on the meta device. Arguments whose values it reads, such as the mask of the text, must
    then be on the CPU.
    """
    with _ShapesWhereMixed(), FlopCounterMode(display=False) as counter:
        root(**arguments)
    return {path: sum(counts.values()) for path, counts in counter.get_flop_counts().items()}


class _ShapesWhereMixed(TorchDispatchMode):
    """Moves the inputs of an operation to the meta device if only some of them are there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        # Indices keep their values, because the values of a mask determine the shape of the result.
        if func is not torch.ops.aten.index.Tensor and len({tensor.is_meta for tensor in tensors}) > 1:
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        return func(*args, **kwargs)
