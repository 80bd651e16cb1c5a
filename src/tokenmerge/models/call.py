"""A call of a host's method that has not been made yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class HostCall(NamedTuple):
    """A method of a host module with its arguments.

    The method is bound to its module. ``names`` are its parameters in order.
    """

    function: Callable
    names: Sequence[str]
    args: tuple
    kwargs: dict[str, Any]

    def result(self) -> Any:
        """Make the call and return its result."""
        return self.function(*self.args, **self.kwargs)

    def argument(self, name: str) -> Any:
        """Return the value of argument ``name``, positional or by name; None if it is not passed."""
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
        place, args, kwargs = self._place(name), self.args, self.kwargs
        if place < len(args):
            args = (*args[:place], value, *args[place + 1 :])
        else:
            kwargs = {**kwargs, name: value}
        # Not _replace: older versions of torch.compile cannot trace it.
        return HostCall(self.function, self.names, args, kwargs)

    def _place(self, name: str) -> int:
        """Return the index of a parameter; past the last positional argument if there is none."""
        return self.names.index(name) if name in self.names else len(self.args)
