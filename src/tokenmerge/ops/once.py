"""Memoises tensors that blocks share, since each operation is a launch on an accelerator."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

Sizes = ParamSpec("Sizes")
Made = TypeVar("Made")
Device: TypeAlias = torch.device | str | None

# Devices on which an operation is no launch, so that less work is faster than fewer operations.
WITHOUT_LAUNCHES = {"cpu"}


def made_once(make: Callable[Sizes, Made]) -> Callable[Sizes, Made]:
    """Memoise a function, so that other calls with the same arguments launch nothing.

    The arguments are sizes and, as the last one, a device. Nobody may change the tensors that it makes.
    """
    # Autograd cannot save tensors of inference mode.
    known: Any = functools.lru_cache(maxsize=256)(torch.inference_mode(False)(make))

    @functools.wraps(make)
    def get(*args: Sizes.args, **kwargs: Sizes.kwargs) -> Made:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined] # sizes may be symbolic
            return make(*args, **kwargs)
        empty = torch.empty(0, device=args[-1])  # type: ignore[call-overload]
        if type(empty) is not Tensor:  # FakeTensorMode makes tensors of its own, and takes no others
            return make(*args, **kwargs)
        made: Made = known(*args[:-1], empty.device)
        return made

    return get


@made_once
def first_numbers(n: int, device: Device) -> Tensor:
    """Return 0 … n−1: ``[n]``."""
    return torch.arange(n, device=device)


@made_once
def first_rows(b: int, n: int, shift: int, device: Device) -> Tensor:
    """Return ``shift`` more than the first row of each of b images of n rows: ``[b, 1]``."""
    return (torch.arange(b, device=device) * n + shift).unsqueeze(1)


@made_once
def ones(b: int, n: int, device: Device) -> Tensor:
    """Return float32 ones: ``[b, n]``."""
    return torch.ones(b, n, device=device)


def version_of(tensor: Tensor) -> int | None:
    """Return how often a tensor was changed in place, or None in inference mode, which does not count."""
    return None if tensor.is_inference() else tensor._version


# What was made for a tensor, by the tensor's id, for as long as it lives. Each block asks several times, and
# PyTorch's dictionary with weak keys takes about three quarters of the time of such a question.
_made: dict[int, tuple[weakref.ref[Tensor], dict[Hashable, Any]]] = {}


def _made_for(of: Tensor) -> dict[Hashable, Any]:
    """Return what was made for a tensor, by its keys."""
    place = id(of)
    found = _made.get(place)
    if found is None or found[0]() is not of:
        # When Python ends, this module's names may be gone before the last tensors are.
        def forget(gone: weakref.ref[Tensor], made: dict[int, Any] = _made) -> None:
            if place in made and made[place][0] is gone:
                del made[place]

        found = weakref.ref(of, forget), {}
        _made[place] = found
    return found[1]


def once(of: Tensor, key: Hashable, make: Callable[[], Made], value: Tensor | None = None) -> Made:
    """Return the result that ``make`` had in the first call with this tensor and key.

    It is made anew where ``value``, if there is one, is another tensor than before or was changed in place. A
    graph makes its own.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return make()
    known = _made_for(of)
    # This is version_of without its call, which takes time, since each block asks.
    version = None if value is None or value.is_inference() else value._version
    last = known.get(key)
    if last is None or last[1] != version or (value is not None and last[0]() is not value):
        with torch.inference_mode(False):  # autograd cannot save tensors of inference mode
            made = make()
        last = (None if value is None else weakref.ref(value), version, made)
        known[key] = last
    found: Made = last[2]
    return found
