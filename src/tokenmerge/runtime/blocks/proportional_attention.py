"""Proportional attention: a merged token counts for as many keys as it stands for (arXiv 2210.09461).

Hosts have nothing in common but the functions that they call for attention: PyTorch's
``scaled_dot_product_attention``, the kernels in diffusers' table of back-ends, which take no mask, or
``xformers.ops.memory_efficient_attention``. While a model with proportional attention is patched, a function
that asks the running context first stands in the place of each.

Under context parallelism the back-ends that call PyTorch's attention are among the kernels: a mask would have
to be gathered from all devices, while longer heads travel between them with the keys.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._guards import CompileContext
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack, handle_torch_function

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import Layout
from tokenmerge.ops.once import once
from tokenmerge.ops.plan import Plan
from tokenmerge.ops.sized_attention import (
    Bias,
    attend_by_columns,
    attend_by_values,
    attend_without_mask,
    choose_bias,
    head_size_with_columns,
)
from tokenmerge.runtime.memory.state import BlockState, ModelState
from tokenmerge.runtime.steps.pipeline import PerThread

_FUSED = "scaled_dot_product_attention"  # name of PyTorch's attention, in its module and in those of hosts
_PYTORCH: Callable[..., Tensor] = torch._C._nn.scaled_dot_product_attention
_ARGUMENTS = (
    "query",
    "key",
    "value",
    "attn_mask",
    "dropout_p",
    "is_causal",
)  # that may have no name in a call
# Back-ends of diffusers that call PyTorch's fused attention, which takes a mask there.
_WITH_MASK = ("native", "_native_cudnn", "_native_efficient", "_native_math")
# By the beginning of a back-end's name, the largest head size that its kernel takes. That of SageAttention 3
# takes two sizes alone, and no other scale than theirs.
_LARGEST_HEADS = {"sage_blackwell": 0, "sage": 128, "_sage": 128, "flash_4": 128}
_LARGEST_HEAD = 256  # of all others
_AXES = 4  # of queries and keys, unless a host folds heads into the batch

_patched: weakref.WeakSet[ModelState] = weakref.WeakSet()


class _Running:
    """What a thread runs."""

    def __init__(self) -> None:
        self.attention: ProportionalAttention | None = None  # that asks for the next call of a kernel


_of_thread = PerThread(_Running)


class ProportionalAttention:
    """While this context lasts, attention adds the logarithm of each key's size to its logits.

    PyTorch's own attention gets what is fastest for that, mostly a mask, and a kernel without masks gets
    longer heads. This happens
    at the call of the kernel, because hosts have nothing else in common: most of them take no mask, or take
    it in a form of their own. Only the first call counts, or the first for each image, since an adapter may
    attend to other keys after it. What a kernel itself calls does not count.

    The plan's ``sizes`` say how many tokens each key of the image stands for, and the layout where the keys
    of text are, which count once. The path of the ``block`` is read for the error message alone, since
    torch.compile makes a graph for each path that is read before.

    Raises:
        UnsupportedModelError: on leaving the context, if no call attended to these keys.
    """

    def __init__(self, plan: Plan, layout: Layout, block: BlockState) -> None:
        self.sizes = plan.sizes
        self.layout = layout
        self.block = block
        self._images_seen = 0
        self._around: ProportionalAttention | None = None

    @property
    def is_pending(self) -> bool:
        """Whether the attention of some image is still to come."""
        return self._images_seen < self.sizes.shape[0]

    def attend_fused(self, attention: Callable[..., Tensor], given: dict[str, Any]) -> Tensor:
        """Return the result of PyTorch's attention, called with the arguments ``given`` and a bias."""
        key = given["key"]
        mask = given.get("attn_mask")
        sizes = self._sizes_of(key.shape[0], key.shape[-2])
        if sizes is None:
            return attention(**given)
        way = choose_bias(key.device.type, key.dtype, key.shape[-1], key.shape[-2], mask is not None)
        if way is Bias.MASK or key.ndim != _AXES or given.get("dropout_p") or given.get("is_causal"):
            return attention(**{**given, "attn_mask": _mask_of(sizes, key, mask)})
        query, key, value, scale = (given.pop(name, None) for name in ("query", "key", "value", "scale"))
        call = functools.partial(attention, **given)
        return attend_without_mask(way, call, query, key, value, sizes, scale)

    def attend(self, kernel: Callable[..., Any], largest_head: int, given: dict[str, Any]) -> Any:
        """Return the result of a kernel that takes no mask, called with the arguments ``given``.

        ``query``, ``key`` and ``value`` are ``[b, n, heads, d]`` or ``[b · heads, n, d]``. The largest d that
        the kernel takes with a ``scale`` is ``largest_head``, or 0 if it takes none.
        """
        sizes = self._sizes_of(*given["key"].shape[:2])
        if sizes is None:
            return kernel(**given)
        query, key, value, scale = (given.pop(name, None) for name in ("query", "key", "value", "scale"))
        call = functools.partial(kernel, **given)
        if head_size_with_columns(query.shape[-1]) <= largest_head:
            return attend_by_columns(call, query, key, value, sizes, scale)
        if scale is not None:
            call = functools.partial(call, scale=scale)
        return attend_by_values(call, query, key, value, sizes)

    def _sizes_of(self, batch: int, tokens: int) -> Tensor | None:
        """Return how often each key counts, ``[batch, tokens]``, or None for other keys than the plan's."""
        images, m = self.sizes.shape
        text = tokens - m
        first = self._images_seen
        seen = 1 if batch == 1 else images  # hosts whose texts differ in length attend image by image
        if text < 0 or batch % seen:
            return None
        self._images_seen += seen
        sizes_of_images = self.sizes if seen == images else self.sizes[first : first + 1]

        def with_text() -> Tensor:
            sizes = F.pad(sizes_of_images, (text, 0) if self.layout.text == "first" else (0, text), value=1.0)
            # Hosts that fold heads into the batch repeat each image for its heads.
            return sizes.repeat_interleave(batch // len(sizes), 0) if batch != len(sizes) else sizes

        if text == 0 and batch == sizes_of_images.shape[0]:
            return sizes_of_images
        return once(self.sizes, (first, batch, text, self.layout.text), with_text)

    def __enter__(self) -> None:
        running = _of_thread.value
        self._around = running.attention
        running.attention = self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        _of_thread.value.attention = self._around
        if self.is_pending and kind is None:
            raise UnsupportedModelError(
                f"{self.block.path}: proportional=True needs attention by PyTorch's "
                "scaled_dot_product_attention, a back-end of diffusers or xFormers, and this one computes it "
                "in another way; take the default attention processor, or proportional=False"
            )


def _mask_of(sizes: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mask that adds ``log(size)`` to the logits of each key, on top of a mask of the host."""
    bias = once(sizes, key.dtype, lambda: _log(sizes, key.dtype))
    bias = bias.view(bias.shape[0], *[1] * (key.ndim - 2), -1)
    if mask is None:
        return bias
    return torch.where(mask, bias, float("-inf")) if mask.dtype == torch.bool else bias + mask


def _log(sizes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the logarithm of sizes in a dtype: one launch, but in a graph, which fuses two."""
    if torch.compiler.is_compiling():
        return sizes.log().to(dtype)
    return torch.log(sizes, out=torch.empty_like(sizes, dtype=dtype))


def reach_kernels(state: ModelState) -> None:
    """Let proportional attention meet the calls of all kernels that are there by now, if the model has it."""
    if any(settings.proportional for _, settings in state.phases):
        if state not in _patched:
            _patched.add(state)
            weakref.finalize(
                state, _leave_outside_of_graphs
            ).atexit = False  # for models that nobody restores
        for names, name, asking in _places():
            if not hasattr(names[name], "_tokenmerge_kernel"):
                names[name] = asking(names[name])


def leave_kernels(state: ModelState) -> None:
    """Put all kernels back, unless another patched model needs them."""
    _patched.discard(state)
    _leave_if_unneeded()


def _leave_outside_of_graphs() -> None:
    """Put all kernels back that nobody needs, unless a graph is being traced.

    Models are collected at any time. The guards of a graph look at what stood there when its tracing began.
    What stays then does nothing, and goes with the next model.
    """
    if CompileContext.try_get() is None:
        _leave_if_unneeded()


def _leave_if_unneeded() -> None:
    if not list(_patched):  # its length may count a model that goes just now
        for names, name, _ in _places():
            names[name] = _original(names[name])


def _original(function: Any) -> Any:
    """Return the function in whose place one of this module stands; another function itself."""
    return getattr(function, "_tokenmerge_kernel", function)


def _places() -> Iterator[tuple[dict[Any, Any], Any, Callable[[Any], Any]]]:
    """Yield where callers look a kernel up, in a dictionary by a key, and what makes one that asks."""
    for names in (vars(F), *_importers(len(sys.modules))):
        yield names, _FUSED, _asking_for_bias
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    backends = getattr(getattr(dispatch, "_AttentionBackendRegistry", None), "_backends", {})
    for backend in list(backends):
        name = getattr(backend, "value", backend)
        sizes = (size for start, size in _LARGEST_HEADS.items() if name.startswith(start))
        largest = next(sizes, _LARGEST_HEAD)
        yield backends, backend, functools.partial(_asking, largest, name in _WITH_MASK)
    xformers = sys.modules.get("xformers.ops")
    if hasattr(xformers, "memory_efficient_attention"):
        yield vars(xformers), "memory_efficient_attention", functools.partial(_asking, _LARGEST_HEAD, False)


@functools.lru_cache(maxsize=1)
def _importers(modules: int) -> list[dict[str, Any]]:
    """Return what is in each of so many modules that imported PyTorch's attention by its name."""
    every = [(name, getattr(module, "__dict__", {})) for name, module in list(sys.modules.items())]
    return [
        names
        for name, names in every
        if not name.startswith("torch.") and _original(names.get(_FUSED)) is _PYTORCH
    ]


@functools.lru_cache(maxsize=128)  # settings change between passes, and kernels hardly ever
def _asking(largest_head: int, takes_mask: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that lets the running :class:`ProportionalAttention` call the kernel.

    A kernel that takes a mask gets one where it calls PyTorch's attention, unless its call is one for several
    devices.
    """
    names = tuple(inspect.signature(function).parameters)
    largest_head = largest_head if "scale" in names else 0

    @functools.wraps(function)
    def attention(*args: Any, **kwargs: Any) -> Any:
        if takes_mask and kwargs.get("_parallel_config") is None:
            return function(*args, **kwargs)
        running = _of_thread.value
        proportional = running.attention
        if proportional is None or not proportional.is_pending:
            return function(*args, **kwargs)
        given = {**dict(zip(names[: len(args)], args, strict=True)), **kwargs}
        running.attention = None
        try:
            return proportional.attend(function, largest_head, given)
        finally:
            running.attention = proportional

    attention._tokenmerge_kernel = function  # type: ignore[attr-defined]
    return attention


@functools.lru_cache(maxsize=128)
def _asking_for_bias(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return PyTorch's attention, which asks the running :class:`ProportionalAttention` for a bias."""

    @functools.wraps(function)
    def attention(*args: Any, **kwargs: Any) -> Tensor:
        running = _of_thread.value
        proportional = running.attention
        if proportional is None or not proportional.is_pending:
            return plain(*args, **kwargs)
        given = {**dict(zip(_ARGUMENTS[: len(args)], args, strict=True)), **kwargs}
        running.attention = None
        try:
            return proportional.attend_fused(plain, given)
        finally:
            running.attention = proportional

    def plain(*args: Any, **kwargs: Any) -> Tensor:
        # Modes of other people wait for the function that stands in the module now.
        if _get_current_function_mode_stack():
            return handle_torch_function(attention, (), *args, **kwargs)
        return function(*args, **kwargs)

    attention._tokenmerge_kernel = function  # type: ignore[attr-defined]
    return attention
