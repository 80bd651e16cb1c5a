"""The method of a host's class that a swapped class calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn


class HostMethod(NamedTuple):
    """A method of a host's class, looked up whenever it is called.

    Other software may replace the method at any time: web UIs switch attention optimisations by
    ``CrossAttention.forward = …``.

    ``of`` returns the method that the class of a module has now, bound to the module. ``names`` returns the
    names of its parameters after ``self``, in order.
    """

    of: Callable[[nn.Module], Callable[..., Any]]
    names: Callable[[], Sequence[str]]


def parameters(function: Callable) -> list[str]:
    """Names of a method's parameters after ``self``."""
    return list(inspect.signature(function).parameters)[1:]
