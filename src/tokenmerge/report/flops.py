"""Counts the operations of a model without its weights."""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from collections.abc import Collection
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from tokenmerge.models.base import is_a
from tokenmerge.runtime.patching.patch import restore
from tokenmerge.runtime.patching.watched import is_watching

# Attributes by which other libraries wrap a module's calls. They may hold references to whole other models.
_WRAPPERS = ("forward", "_old_forward", "_hf_hook", "_diffusers_hook", "_compiled_call_impl")


def weightless(root: nn.Module, on_cpu: Collection[str] = ()) -> nn.Module:
    """Make an unpatched copy of a model on the meta device: its parameters and buffers have no values.

    The parameters named in ``on_cpu`` become zeros on the CPU instead. The copy of a model that splits tokens
    between devices runs on all of them.
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
        memo |= _plain_processor(module)
    if (parallel := getattr(root, "_parallel_config", None)) is not None:
        memo[id(parallel)] = None
    copied = copy.deepcopy(root, memo)
    restore(copied)
    for module in copied.modules():
        for name in _WRAPPERS:
            module.__dict__.pop(name, None)
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        processor: Any = getattr(module, "processor", None)
        if hasattr(processor, "_attention_backend"):
            processor._attention_backend = "native"  # other kernels of diffusers know no meta device
    return copied


def _plain_processor(attention: nn.Module) -> dict[int, Any]:
    """Return the default processor of an attention, by the id of one that may keep what it sees.

    Counting must not call such a processor, whose state a copy may share.
    """
    processor = getattr(attention, "processor", None)
    if processor is None or not is_watching(processor):
        return {}
    module = sys.modules.get("diffusers.models.attention_processor")
    plain = getattr(module, "AttnProcessor2_0", None) if is_a(attention, "Attention") else None
    make = getattr(type(attention), "_default_processor_cls", plain)
    return {} if make is None else {id(processor): make()}


@torch.no_grad()
def count_flops(root: nn.Module, arguments: dict[str, Any]) -> dict[str, int]:
    """Count the FLOPs of one call for every module, by its path, which starts with the class of the root.

    The model may be on the meta device. Arguments whose values it reads, such as the mask of the text, must
    then be on the CPU.
    """
    with _ShapesAlone(), FlopCounterMode(display=False) as counter:
        root(**arguments)
    return {path: sum(counts.values()) for path, counts in counter.get_flop_counts().items()}


class _ShapesAlone(TorchDispatchMode):
    """Runs operations on the meta device.

    If only some inputs of an operation are on it, the others are moved there. Operations are repeated in most
    blocks and cost a millisecond of Python each, so the shapes of their results are cached.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        on_meta = {leaf.is_meta for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        # Indices keep their values, because the values of a mask determine the shape of the result.
        if func is not torch.ops.aten.index.Tensor and len(on_meta) > 1:
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
            on_meta = {True}
        if on_meta == {True} and not _aliases(func):
            return _made(_result(func, _key(args), tuple(kwargs), _key(tuple(kwargs.values()))))
        return func(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class _Described:
    """A tensor on the meta device."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


@functools.cache
def _aliases(func: Any) -> bool:
    """Return whether an operation changes an argument, or its result may be a view of one."""
    schema = func._schema
    return any(one.alias_info is not None for one in (*schema.arguments, *schema.returns))


def _described(tensor: Tensor) -> _Described:
    return _Described(tensor.shape, tensor.stride(), tensor.dtype)


def _key(value: Any) -> Any:
    """Describe an argument by what has a hash: (type, value), since 1, 1.0 and True are equal as keys."""
    # Not by the structures of PyTorch's pytree, which have none in PyTorch 2.7.
    if isinstance(value, Tensor):
        return _described(value)
    return type(value), tuple(map(_key, value)) if isinstance(value, list | tuple) else value


def _of_key(key: Any) -> Any:
    """Return the argument that a key describes, with new tensors."""
    if isinstance(key, _Described):
        return _made(key)
    kind, value = key
    return kind([_of_key(part) for part in value]) if issubclass(kind, list | tuple) else value


def _made(described: Any) -> Any:
    """Make a result with new tensors in place of the described ones."""
    if isinstance(described, _Described):
        shape, stride, dtype = described.shape, described.stride, described.dtype
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return type(described)(map(_made, described)) if isinstance(described, list | tuple) else described


@functools.lru_cache(maxsize=10_000)
def _result(func: Any, args: Any, names: tuple[str, ...], values: Any) -> Any:
    """Run an operation, and return its result with tensors described."""
    named = dict(zip(names, _of_key(values), strict=True))
    return tree_map_only(Tensor, _described, func(*_of_key(args), **named))
