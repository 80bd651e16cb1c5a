"""Attention kernels that take no mask, and where proportional attention meets their calls.

PyTorch's fused attention can be intercepted by a ``TorchFunctionMode``. The kernels of FlashAttention,
SageAttention, xFormers and others are plain functions, which models call through diffusers' table of
back-ends or as ``xformers.ops.memory_efficient_attention``. While a model with proportional attention is
patched, a function that asks the running context first stands in the place of each.

Under context parallelism the back-ends that call PyTorch's attention are among them: a mask would have to be
gathered from all devices, while longer heads travel between them with the keys.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.overrides import _get_current_function_mode_stack

from tokenmerge.runtime.blocks.proportional_attention import Kernel, ProportionalAttention
from tokenmerge.runtime.memory.state import ModelState

# Back-ends of diffusers that call PyTorch's fused attention, which takes a mask there.
_WITH_MASK = ("native", "_native_cudnn", "_native_efficient", "_native_math")
# By the beginning of a back-end's name, the largest head size that its kernel takes. That of SageAttention 3
# takes two sizes alone, and no other scale than theirs.
_LARGEST_HEADS = {"sage_blackwell": 0, "sage": 128, "_sage": 128, "flash_4": 128}
_LARGEST_HEAD = 256  # of all others

_patched: weakref.WeakSet[ModelState] = weakref.WeakSet()


def reach_kernels(state: ModelState) -> None:
    """Let proportional attention meet the calls of all kernels that are there by now, if the model has it."""
    if any(settings.proportional for _, settings in state.phases):
        _patched.add(state)
        for place, name, largest_head in _places():
            if not hasattr(place[name], "_tokenmerge_kernel"):
                place[name] = _asking(place[name], largest_head, takes_mask=name in _WITH_MASK)


def leave_kernels(state: ModelState) -> None:
    """Put all kernels back, unless another patched model needs them."""
    _patched.discard(state)
    if not _patched:
        for place, name, _ in _places():
            place[name] = getattr(place[name], "_tokenmerge_kernel", place[name])


def _places() -> Iterator[tuple[dict[Any, Any], Any, int]]:
    """Where kernels are looked up by those who call them: (dictionary, key, largest head size)."""
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    registry = getattr(dispatch, "_AttentionBackendRegistry", None)
    backends = getattr(registry, "_backends", {})
    for backend in list(backends):
        name = getattr(backend, "value", backend)
        sizes = (size for start, size in _LARGEST_HEADS.items() if name.startswith(start))
        yield backends, backend, next(sizes, _LARGEST_HEAD)
    xformers = sys.modules.get("xformers.ops")
    if hasattr(xformers, "memory_efficient_attention"):
        yield vars(xformers), "memory_efficient_attention", _LARGEST_HEAD


@functools.lru_cache(maxsize=128)  # settings change between passes, and kernels hardly ever
def _asking(function: Callable[..., Any], largest_head: int, takes_mask: bool) -> Callable[..., Any]:
    """Return a function that lets the running :class:`ProportionalAttention` call the kernel.

    A kernel that takes a mask gets one, unless its call is one for several devices.
    """
    names = tuple(inspect.signature(function).parameters)
    kernel = Kernel(function, largest_head if "scale" in names else 0)

    @functools.wraps(function)
    def attention(*args: Any, **kwargs: Any) -> Any:
        if takes_mask and kwargs.get("_parallel_config") is None:
            return function(*args, **kwargs)
        for mode in _get_current_function_mode_stack():
            if isinstance(mode, ProportionalAttention) and mode.is_pending:
                return mode.attend(kernel, {**dict(zip(names[: len(args)], args, strict=True)), **kwargs})
        return function(*args, **kwargs)

    attention._tokenmerge_kernel = function  # type: ignore[attr-defined]
    return attention
