"""The call of a host's method, before it is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

__all__ = ["HostCall"]


class HostCall(NamedTuple):
    """A method of the host and what it is called with.

    Attributes:
        function: the method, bound to its module.
        names: of its parameters, in order.
        args: positional arguments.
        kwargs: arguments by name.
    """

    function: Callable
    names: Sequence[str]
    args: tuple
    kwargs: dict[str, Any]

    def result(self) -> Any:
        """What the method returns."""
        return self.function(*self.args, **self.kwargs)

    def argument(self, name: str) -> Any:
        """The argument called ``name``, however it was passed; None where it was not."""
        if name in self.kwargs:
            return self.kwargs[name]
        place = self._place(name)
        return self.args[place] if place < len(self.args) else None

    def has(self, wanted: Sequence[str]) -> bool:
        """Whether one of the arguments ``wanted`` is given, also within a dictionary of arguments."""
        within = [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, dict)]
        return any(
            self.argument(name) is not None or any(more.get(name) is not None for more in within)
            for name in wanted
        )

    def replaced(self, name: str, value: Any) -> HostCall:
        """The call with another value for the argument called ``name``, however it is passed."""
        place = self._place(name)
        if place < len(self.args):
            return self._with((*self.args[:place], value, *self.args[place + 1 :]), self.kwargs)
        return self._with(self.args, {**self.kwargs, name: value})

    def changed(self, change: Callable[[str, Any], Any]) -> HostCall:
        """The call with each argument put through ``change(name, value)``; those without a name stay."""
        named = (change(name, value) for name, value in zip(self.names, self.args, strict=False))
        return self._with(
            (*named, *self.args[len(self.names) :]),
            {name: change(name, value) for name, value in self.kwargs.items()},
        )

    def _with(self, args: tuple, kwargs: dict[str, Any]) -> HostCall:
        # Not _replace, which older versions of torch.compile do not follow.
        return HostCall(self.function, self.names, args, kwargs)

    def _place(self, name: str) -> int:
        """Where an argument is among the positional ones; behind them, where it is not."""
        return self.names.index(name) if name in self.names else len(self.args)
