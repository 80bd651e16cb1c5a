"""Proportional attention: a merged token counts for as many keys as it stands for (arXiv 2210.09461).

PyTorch's fused attention can be intercepted by a ``TorchFunctionMode``. The kernels of FlashAttention,
SageAttention, xFormers and others are plain functions without masks, which models call through diffusers'
table of back-ends or as ``xformers.ops.memory_efficient_attention``. While a model with proportional
attention is patched, a function that asks the running context first stands in the place of each.

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

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import Layout
from tokenmerge.ops.once import once
from tokenmerge.ops.plan import Plan
from tokenmerge.ops.sized_attention import attend_by_columns, attend_by_values, head_size_with_columns
from tokenmerge.runtime.memory.state import BlockState, ModelState

# Back-ends of diffusers that call PyTorch's fused attention, which takes a mask there.
_WITH_MASK = ("native", "_native_cudnn", "_native_efficient", "_native_math")
# By the beginning of a back-end's name, the largest head size that its kernel takes. That of SageAttention 3
# takes two sizes alone, and no other scale than theirs.
_LARGEST_HEADS = {"sage_blackwell": 0, "sage": 128, "_sage": 128, "flash_4": 128}
_LARGEST_HEAD = 256  # of all others

_patched: weakref.WeakSet[ModelState] = weakref.WeakSet()
_in_graph: list[ProportionalAttention] = []  # of the graph that is traced, those whose context lasts


class ProportionalAttention(TorchFunctionMode):
    """While this context lasts, fused attention adds the logarithm of each key's size to its logits.

    PyTorch's own attention gets a mask for that, and a kernel without masks gets longer heads. This happens
    at the call of the kernel, because hosts have nothing else in common: most of them take no mask, or take
    it in a form of their own. Only the first call counts, or the first for each image, since an adapter may
    attend to other keys after it.

    The plan's ``sizes`` say how many tokens each key of the image stands for, and the layout where the keys
    of text are, which count once. The path of the ``block`` is read for the error message alone, since
    torch.compile makes a graph for each path that is read before.

    Raises:
        UnsupportedModelError: on leaving the context, if no call attended to these keys.
    """

    def __init__(self, plan: Plan, layout: Layout, block: BlockState) -> None:
        super().__init__()
        self.sizes, self.layout, self.block = plan.sizes, layout, block
        self._images_seen = 0

    @property
    def is_pending(self) -> bool:
        """Whether the attention of some image is still to come."""
        return self._images_seen < len(self.sizes)

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():
            self = _in_graph[-1]  # PyTorch 2.7 gives the class
        kwargs = kwargs or {}
        if function is torch.Tensor.unflatten:  # torch.compile traces the method, and not this function
            return args[0].unflatten(*args[1:], **kwargs)
        if function is not F.scaled_dot_product_attention or not self.is_pending:
            return function(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names[: len(args)], args, strict=True)), **kwargs}
        key: Tensor = given["key"]
        sizes = self._sizes_of(len(key), key.shape[-2])
        if sizes is None:
            return function(**given)
        bias = once(sizes, key.dtype, lambda: _log(sizes, key.dtype))
        bias = bias.view(len(bias), *[1] * (key.ndim - 2), -1)
        mask = given.get("attn_mask")
        if mask is not None and mask.dtype == torch.bool:
            bias = torch.where(mask, bias, float("-inf"))
        elif mask is not None:
            bias = bias + mask
        return function(**{**given, "attn_mask": bias})

    def attend(self, kernel: Callable[..., Any], largest_head: int, given: dict[str, Any]) -> Any:
        """Return the result of a kernel that takes no mask, called with the arguments ``given``.

        ``query``, ``key`` and ``value`` are ``[b, n, heads, d]`` or ``[b · heads, n, d]``. The largest d that
        the kernel takes with a ``scale`` is ``largest_head``; 0: it takes none.
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
        """``[batch, tokens]``: how often each key counts; None: these are not the keys of the plan."""
        images, m = self.sizes.shape
        text, first = tokens - m, self._images_seen
        seen = 1 if batch == 1 else images  # hosts whose texts differ in length attend image by image
        if text < 0 or batch % seen:
            return None
        self._images_seen += seen
        own = self.sizes if seen == images else self.sizes[first : first + 1]

        def with_text() -> Tensor:
            sizes = F.pad(own, (text, 0) if self.layout.text == "first" else (0, text), value=1.0)
            # Hosts that fold heads into the batch repeat each image for its heads.
            return sizes.repeat_interleave(batch // len(sizes), 0) if batch != len(sizes) else sizes

        if text == 0 and batch == len(own):
            return own
        return once(self.sizes, (first, batch, text, self.layout.text), with_text)

    def __enter__(self) -> Any:
        if torch.compiler.is_compiling():
            _in_graph.append(self)
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if torch.compiler.is_compiling():
            _in_graph.pop()
        if self.is_pending and kind is None:
            raise UnsupportedModelError(
                f"{self.block.path}: proportional=True needs attention by PyTorch's "
                "scaled_dot_product_attention, a back-end of diffusers or xFormers, and this one computes it "
                "in another way; take the default attention processor, or proportional=False"
            )


def _log(sizes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the logarithm of sizes in a dtype: one launch, but in a graph, which fuses two."""
    if torch.compiler.is_compiling():
        return sizes.log().to(dtype)
    return torch.log(sizes, out=torch.empty_like(sizes, dtype=dtype))


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
    backends = getattr(getattr(dispatch, "_AttentionBackendRegistry", None), "_backends", {})
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
    largest_head = largest_head if "scale" in names else 0

    @functools.wraps(function)
    def attention(*args: Any, **kwargs: Any) -> Any:
        if takes_mask and kwargs.get("_parallel_config") is None:
            return function(*args, **kwargs)
        for mode in _get_current_function_mode_stack():
            if isinstance(mode, ProportionalAttention) and mode.is_pending:
                given = {**dict(zip(names[: len(args)], args, strict=True)), **kwargs}
                return mode.attend(function, largest_head, given)
        return function(*args, **kwargs)

    attention._tokenmerge_kernel = function  # type: ignore[attr-defined]
    return attention
