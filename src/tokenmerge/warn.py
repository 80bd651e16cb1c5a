"""Warnings at the line that called this package."""

from __future__ import annotations

import sys
import warnings

_NOT_THE_CALLER = ("tokenmerge", "torch", "diffusers", "contextlib")  # a call comes through them


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line that called this package, through PyTorch and diffusers."""
    frame = sys._getframe(1)
    level = 2
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in _NOT_THE_CALLER:
        frame = frame.f_back
        level += 1
    warnings.warn(message, category, stacklevel=level)


def warn_renamed(old: str, new: str) -> None:
    """Warn that a public name has changed. The old one still works."""
    warn_caller(f"{old} is deprecated; take {new} instead", DeprecationWarning)
