"""The method of a host's class that a swapped class calls, and the names of its parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn


class HostMethod(NamedTuple):
    """A method of a host's class, looked up whenever it is called.

    Other software may replace it at any time: web UIs switch attention by ``CrossAttention.forward = …``.
    ``of`` returns the method that the class of a module has now, bound to the module, and ``names`` the names
    of its parameters after ``self``.
    """

    of: Callable[[nn.Module], Callable[..., Any]]
    names: Callable[[], Sequence[str]]


def host_method(base: type, swapped: Any, method: str) -> HostMethod:
    """Return the ``method`` of a host's class ``base``, for modules of its subclass ``swapped``."""
    first = getattr(base, method)

    def of(module: nn.Module) -> Callable[..., Any]:
        if isinstance(module, swapped):
            # By super(): torch.compile cannot look methods up on a class that is marked as allowed in
            # the graph, and diffusers marks its attention classes so.
            return getattr(super(swapped, module), method)
        # Called through a reference that was taken before the module was restored.
        return MethodType(getattr(base, method), module)

    @torch.compiler.assume_constant_result
    def names() -> Sequence[str]:
        return _names(getattr(base, method), first)

    return HostMethod(of, names)


@functools.lru_cache
def _names(function: Callable, first: Callable) -> Sequence[str]:
    """Parameters of a method; a wrapper that passes on whatever it gets has those of the ``first`` method."""
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    return tuple(parameters(first if inspect.Parameter.VAR_POSITIONAL in kinds else function))


def parameters(function: Callable) -> list[str]:
    """Return the names of a method's parameters after ``self``."""
    return list(inspect.signature(function).parameters)[1:]
