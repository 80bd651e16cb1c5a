"""Reading and writing files: errors in one line, results that are never half-written.

In every function, ``option`` is the command-line option that a path comes from, and ``advice`` says what
to do next. Both are for the message of an error.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmerge.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

FREE_SPACE = "free some space, or choose another place with --out"


def slug(text: str, longest: int = 40) -> str:
    """A short folder name made from a prompt.

    >>> slug("A red apple, on a table!")
    'a-red-apple-on-a-table'
    """
    words = re.sub(r"[^\w]+", "-", text.lower()).strip("-_")
    return words[:longest].rstrip("-_") or "picture"


def free_folder(parent: Path, name: str) -> Path:
    """``parent/name``, or the first of ``parent/name-2`` … that is free: no result is written over."""
    folder, number = parent / name, 1
    while folder.exists():
        number += 1
        folder = parent / f"{name}-{number}"
    return folder


def prepare_folder(folder: Path) -> None:
    """Create ``folder`` and make sure that files can be written into it.

    Raises:
        ConfigError: they cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"out: cannot write to {folder} ({error.strerror or error}); choose another folder with --out"
        ) from error


def is_folder(path: Path) -> bool:
    """Whether ``path`` is a folder; a path that is too long to look up is none."""
    try:
        return path.is_dir()
    except OSError:
        return False


def is_file(path: Path) -> bool:
    """Whether ``path`` is a regular file; a path that is too long to look up is none."""
    try:
        return path.is_file()
    except OSError:
        return False


def check_regular(path: Path) -> None:
    """Refuse devices and pipes, which have no end: ``/dev/full`` gives zeros until memory runs out.

    Raises:
        OSError: ``path`` is one of them, or cannot be looked up.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError("it is not a regular file")


def read_bytes(path: Path, option: str, advice: str) -> bytes:
    """Read a regular file.

    Raises:
        ConfigError: it is not there, cannot be read or is not a regular file.
    """
    try:
        check_regular(path)
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{option}: cannot read {path} ({error.strerror or error}); {advice}") from error


def open_picture(path: Path, option: str, advice: str) -> Image:
    """Read a picture as RGB.

    Raises:
        ConfigError: the file cannot be read, or is not a picture.
    """
    import PIL.Image

    content = io.BytesIO(read_bytes(path, option, advice))
    try:
        with PIL.Image.open(content) as picture:
            return picture.convert("RGB")
    # Pillow raises the others for broken PNG chunks and for pictures that are suspiciously large.
    except (OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError) as error:
        raise ConfigError(f"{option}: cannot read the picture {path} (it is no picture); {advice}") from error


@contextlib.contextmanager
def writing(path: Path, option: str, advice: str) -> Iterator[None]:
    """Make the folder of ``path``; turn what the file system refuses meanwhile into a ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_regular(path)
        yield
    except OSError as error:
        raise ConfigError(f"{option}: cannot write {path} ({error.strerror or error}); {advice}") from error


def write_atomically(
    path: Path, write: Callable[[Path], object], option: str = "out", advice: str = FREE_SPACE
) -> None:
    """Let ``write`` fill a file beside ``path`` with the same suffix, then move it there in one step.

    Raises:
        ConfigError: the disk is full, or refuses the file for another reason. An older file stays as it was.
    """
    with writing(path, option, advice):
        descriptor, name = tempfile.mkstemp(suffix=path.suffix, prefix=f".{path.stem}-", dir=path.parent)
        os.close(descriptor)
        unfinished = Path(name)
        try:
            write(unfinished)
            unfinished.chmod(0o644)  # mkstemp makes files that only their owner can read
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


def write_text(path: Path, text: str, advice: str = FREE_SPACE) -> None:
    """Write a text as UTF-8, as :func:`write_atomically` does."""
    write_atomically(path, lambda unfinished: unfinished.write_text(text, encoding="utf-8"), advice=advice)


def write_json(path: Path, value: Any, advice: str = FREE_SPACE) -> None:
    """Write ``value`` as JSON that every reader accepts: no NaN, no Infinity.

    Raises:
        ConfigError: as for :func:`write_atomically`.
        ValueError: ``value`` holds a number that JSON does not know.
    """
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", advice)
