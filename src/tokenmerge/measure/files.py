"""Writing results so that none is half-written and none is lost."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenmerge.errors import ConfigError

__all__ = ["free_folder", "prepare_folder", "slug", "write_atomically", "write_json", "writing"]


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


@contextlib.contextmanager
def writing(path: Path, option: str, advice: str) -> Iterator[None]:
    """Make the folder of ``path``, and turn what the file system refuses meanwhile into a ConfigError.

    Args:
        path: what is written.
        option: the option that the path comes from.
        advice: what to do next, in words.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigError(f"{option}: cannot write {path} ({error.strerror or error}); {advice}") from error


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a file beside ``path``, then move it there in one step.

    Args:
        path: where the result goes; its folder exists.
        write: called with a path of the same suffix.
    """
    descriptor, name = tempfile.mkstemp(suffix=path.suffix, prefix=f".{path.stem}-", dir=path.parent)
    os.close(descriptor)
    unfinished = Path(name)
    try:
        write(unfinished)
        unfinished.chmod(0o644)  # mkstemp makes files that only their owner can read
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON that every reader accepts: no NaN, no Infinity.

    Raises:
        ValueError: ``value`` holds a number that JSON does not know.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(path, lambda unfinished: unfinished.write_text(text, encoding="utf-8"))
