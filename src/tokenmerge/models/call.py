"""A method of a host's class, and a call of it that has not been made yet."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn


class HostCall(NamedTuple):
    """A method of a host module with its arguments."""

    function: Callable  # bound to its module
    names: Sequence[str]  # of its parameters in order
    args: tuple
    kwargs: dict[str, Any]

    def result(self) -> Any:
        """Make the call and return its result."""
        return self.function(*self.args, **self.kwargs)

    def argument(self, name: str) -> Any:
        """Return the value of argument ``name``, positional or by name, or None if it is not passed."""
        if name in self.kwargs:
            return self.kwargs[name]
        place = self._place(name)
        return self.args[place] if place < len(self.args) else None

    def has(self, wanted: Sequence[str]) -> bool:
        """Return whether one of the arguments ``wanted`` is passed, directly or inside a dictionary."""
        if not wanted:
            return False
        within = [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, dict)]
        return any(
            self.argument(name) is not None or any(more.get(name) is not None for more in within)
            for name in wanted
        )

    def replaced(self, name: str, value: Any) -> HostCall:
        """Return the call with another value for argument ``name``."""
        place = self._place(name)
        args = self.args
        kwargs = self.kwargs
        if place < len(args):
            args = (*args[:place], value, *args[place + 1 :])
        else:
            kwargs = {**kwargs, name: value}
        # Older versions of torch.compile cannot trace _replace.
        return HostCall(self.function, self.names, args, kwargs)

    def _place(self, name: str) -> int:
        """Return the index of a parameter, or one past the last positional argument if there is none."""
        return self.names.index(name) if name in self.names else len(self.args)


class HostMethod(NamedTuple):
    """A method of a host's class, looked up whenever it is called.

    Other software may replace it at any time: web UIs switch attention by ``CrossAttention.forward = …``.
    """

    # Returns the method that the class of a module has now, bound to it.
    of: Callable[[nn.Module], Callable[..., Any]]
    names: Callable[[], Sequence[str]]  # of its parameters after ``self``


def host_method(base: type, swapped: Any, method: str) -> HostMethod:
    """Return the ``method`` of a host's class ``base``, for modules of its subclass ``swapped``."""
    first = getattr(base, method)

    def of(module: nn.Module) -> Callable[..., Any]:
        if isinstance(module, swapped):
            # It is looked up by super(), since torch.compile cannot look methods up on a class that is marked
            # as allowed in the graph, and diffusers marks its attention classes so.
            return getattr(super(swapped, module), method)
        # The call goes through a reference that was taken before the module was restored.
        return MethodType(getattr(base, method), module)

    @torch.compiler.assume_constant_result
    def names() -> Sequence[str]:
        return _names(getattr(base, method), first)

    return HostMethod(of, names)


@functools.lru_cache
def _names(function: Callable, first: Callable) -> Sequence[str]:
    """Return the parameters of a method, or of the ``first`` one if it is a wrapper that passes on all."""
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    return tuple(parameters(first if inspect.Parameter.VAR_POSITIONAL in kinds else function))


def parameters(function: Callable) -> list[str]:
    """Return the names of a method's parameters after ``self``."""
    return list(inspect.signature(function).parameters)[1:]
