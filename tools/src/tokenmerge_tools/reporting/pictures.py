"""Encodes pictures as data URLs, so that a page needs no other file."""

from __future__ import annotations

import base64
from pathlib import Path

from tokenmerge.errors import ConfigError
from tokenmerge_tools.files import check_regular

_SIGNATURES = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg", b"RIFF": "image/webp"}


def data_address(path: Path) -> str:
    """Encode a PNG, JPEG or WebP file as a data URL.

    Raises:
        ConfigError: the file cannot be read, or has another format.
    """
    return f"data:{picture_type(path)};base64,{base64.b64encode(path.read_bytes()).decode()}"


def picture_type(path: Path) -> str:
    """Find the media type of a PNG, JPEG or WebP file from its first bytes.

    Raises:
        ConfigError: the file cannot be read, or has another format.
    """
    try:
        check_regular(path)
        with path.open("rb") as file:
            begin = file.read(max(map(len, _SIGNATURES)))
    except OSError as error:
        raise ConfigError(f"sample: cannot read the picture {path} ({error.strerror or error})") from error
    found = next((kind for start, kind in _SIGNATURES.items() if begin.startswith(start)), None)
    if found is None:
        raise ConfigError(f"sample: {path} is not a PNG, JPEG or WebP picture")
    return found


def svg_address(svg: str) -> str:
    """Encode an SVG document as a data URL. As an image it runs no scripts, and its ids stay separate."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
