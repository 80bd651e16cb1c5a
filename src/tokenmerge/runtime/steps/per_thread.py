"""A value of its own for each thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class PerThread(threading.local, Generic[Value]):
    """Holds one value for each thread, made when the thread first asks for it.

    Copies and pickles of a model begin with new values.

    The value itself is an ordinary object whose attributes change. ``torch.compile`` follows such changes,
    and it would lose assignments to attributes of a ``threading.local``.
    """

    def __init__(self, make: Callable[[], Value]) -> None:
        # Python calls this in every thread that uses the object, with the arguments of the first call.
        self._make = make
        self.value = make()

    def __deepcopy__(self, memo: dict[int, Any]) -> PerThread[Value]:
        return PerThread(self._make)

    def __reduce__(self) -> tuple[Any, ...]:
        return PerThread, (self._make,)
