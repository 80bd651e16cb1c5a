"""Former names of settings, which still work and warn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tokenmerge.warn import warn_renamed

C = TypeVar("C", bound=type)

# The parts of a ToMeConfig that had other names.
FORMER_PARTS: Mapping[str, str] = {"plans": "merge_sharing"}


def current_name(name: str, former: Mapping[str, str] = FORMER_PARTS) -> str:
    """Return the current name of a setting, such as ``"merge_sharing.every"`` for ``"plans.every"``."""
    part, dot, field = str(name).partition(".")
    if part not in former:
        return name
    current = f"{former[part]}{dot}{field}"
    warn_renamed(name, current)
    return current


def takes_former_names(**former: str) -> Callable[[C], C]:
    """Let a dataclass take keyword arguments by their former names.

    If an argument is given by both names, the value of the former one is taken: ``dataclasses.replace`` with
    a former name passes what the object had under the current one too.
    """

    def decorated(cls: C) -> C:
        init: Callable[..., None] = cls.__init__  # type: ignore[misc]

        @functools.wraps(init)
        def with_current_names(self: Any, *args: Any, **given: Any) -> None:
            for name in [name for name in given if name in former]:
                given[current_name(name, former)] = given.pop(name)
            init(self, *args, **given)

        cls.__init__ = with_current_names  # type: ignore[misc]
        return cls

    return decorated
