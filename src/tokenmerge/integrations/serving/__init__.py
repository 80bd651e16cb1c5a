"""Plug-ins for servers that run diffusers pipelines: one file for each server.

A server finds its plug-in by an entry point of this package. The plug-in does nothing unless the environment
of the server asks for token merging, as is read here. Nothing heavy is imported before a server with such an
environment calls the plug-in.
"""

from __future__ import annotations

import os

from tokenmerge.config.checks import number
from tokenmerge.errors import ConfigError

SPEEDUP, SETTINGS = "TOKENMERGE_SPEEDUP", "TOKENMERGE_SETTINGS"
REQUESTED = "tokenmerge_speedup"  # what a request calls its own speed-up
DENSE = 1.0

speedup = number("a number ≥ 1, such as 2.0", lambda value: value >= 1)


def is_asked() -> bool:
    """Return whether the environment asks for token merging."""
    return bool(os.environ.get(SPEEDUP) or os.environ.get(SETTINGS))


def by_environment() -> float | str:
    """Return the wanted speed-up, or the path of a file of settings.

    Raises:
        ConfigError: the speed-up is not a number ≥ 1, or both are set.
    """
    text, path = os.environ.get(SPEEDUP), os.environ.get(SETTINGS)
    if text and path:
        raise ConfigError(
            f"{SPEEDUP}, {SETTINGS}: expected one of them, got {text!r} and {path!r}; unset the other one"
        )
    if path:
        return path
    try:
        value: object = float(text or "")
    except ValueError:
        value = text
    return speedup(SPEEDUP, value)
