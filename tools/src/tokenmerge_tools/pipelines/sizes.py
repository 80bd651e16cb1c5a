"""Reads and checks picture sizes."""

from __future__ import annotations

import re

from tokenmerge.errors import ConfigError, shown


def parse_size(text: str) -> tuple[int, int]:
    """Read ``WIDTHxHEIGHT``, or one number for a square, into (width, height) in pixels.

    >>> parse_size("768x512"), parse_size("512")
    ((768, 512), (512, 512))

    Raises:
        ConfigError: the text is neither.
    """
    found = re.fullmatch(r"\s*(\d{1,9})\s*(?:[x×X*]\s*(\d{1,9})\s*)?", text)
    if found is None or 0 in (sides := (int(found[1]), int(found[2] or found[1]))):
        raise ConfigError(
            f"size: expected WIDTHxHEIGHT or one number, such as 768x512 or 512, got {shown(text)}"
        )
    return sides


def check_size(size: tuple[int, int], scale: int) -> tuple[int, int]:
    """Turn (width, height) in pixels into (width, height) of the latents.

    ``scale`` is the number of pixels per latent position along each side.

    Raises:
        ConfigError: a side is not a multiple of ``scale``.
    """
    width, height = size
    if width % scale or height % scale:
        nearest = "x".join(str(max(scale, round(side / scale) * scale)) for side in size)
        raise ConfigError(
            f"size: this model needs multiples of {scale} pixels, got {width}x{height}; use {nearest}"
        )
    return width // scale, height // scale
