"""The former name of :mod:`tokenmerge.images`."""

from __future__ import annotations

from typing import Any

from tokenmerge import images
from tokenmerge.warn import warn_renamed


def __getattr__(name: str) -> Any:
    """Return what the module of the current name has, with a warning (PEP 562)."""
    value = getattr(images, name)
    warn_renamed(f"tokenmerge.pictures.{name}", f"tokenmerge.images.{name}")
    return value
