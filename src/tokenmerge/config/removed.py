"""Settings that were tried and removed, because another setting was better at the same speed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from tokenmerge.errors import ConfigError

PAGE = "docs/tried-and-removed.md"
# Removed settings, each with the values at which it did nothing. Files in which it has one of them are read.
REMOVED: Mapping[str, tuple[Any, ...]] = {
    "blend": (0,),
    "clusters": (16,),
    "repeat_penalty": (0,),
    "correction.steps": ((), []),
    "reuse.ends": (None, "full"),
    "reuse.spacing": (None, 1),
    "reuse.start": (0,),
    "reuse.shallow_from": (0,),
    "reuse.shallow_until": (1,),
    "reuse.span": (1,),
}
# Removed values of settings that still exist.
REMOVED_VALUES: Mapping[str, tuple[str, ...]] = {
    "combine": ("norm", "reuse", "extrapolate"),
    "features": ("keys",),
    "planner": ("clusters", "local", "ras"),
    "scope": ("stack",),
}


def without_removed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, by dotted name, without removed ones that do nothing.

    Raises:
        ConfigError: a removed setting would do something.

    >>> without_removed({"ratio": 0.5, "blend": 0.0})
    {'ratio': 0.5}
    """
    for name, value in settings.items():
        plain = value is None or isinstance(value, int | float | str | list | tuple)
        idle = plain and value in REMOVED.get(name, ())
        if name in REMOVED and not idle:
            refuse_removed(name, repr(value), "leave it out")
    return {name: value for name, value in settings.items() if name not in REMOVED}


def refuse_removed(name: str, what: str, instead: str) -> NoReturn:
    """Raise the error for something that was removed, with what to do instead."""
    raise ConfigError(f"{name}: {what} was removed ({PAGE} says why); {instead}")
