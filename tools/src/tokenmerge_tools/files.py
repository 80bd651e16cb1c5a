"""Reads and writes files, with one-line errors and without half-written results.

In every function, ``option`` is the command-line option that a path comes from, and ``advice`` says what
to do next. Both appear in error messages.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmerge.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

_LARGEST = 2**30  # bytes
_results: list[Path] = []  # the files with results that this process has written
FREE_SPACE = "free some space, or choose another place with --out"


def slug(text: str, longest: int = 40) -> str:
    """Return a short folder name made from the first words of a prompt.

    >>> slug("A red apple, on a table!"), slug("A red apple, on a table!", longest=14)
    ('a-red-apple-on-a-table', 'a-red-apple-on')
    """
    words = re.sub(r"[^\w]+", "-", text.lower()).strip("-_")
    short = words[:longest]
    if len(words) > longest and words[longest] != "-" and "-" in short:
        short = short.rpartition("-")[0]
    return short.rstrip("-_") or "picture"


def free_folder(parent: Path, name: str) -> Path:
    """Return ``parent/name``, or the first of ``parent/name-2`` … that does not exist yet."""
    folder = parent / name
    number = 1
    while folder.exists():
        number += 1
        folder = parent / f"{name}-{number}"
    return folder


def prepare_folder(folder: Path) -> None:
    """Create ``folder`` and make sure that files can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"out: cannot write to {folder} ({error.strerror or error}); choose another folder with --out"
        ) from error


@contextlib.contextmanager
def gone_without_results(folder: Path) -> Iterator[None]:
    """Prepare a folder, and remove it after an error if it is new and this process wrote no result."""
    is_new = not folder.exists()
    parents = [parent for parent in folder.parents if not parent.exists()]
    before = results_written()
    prepare_folder(folder)
    try:
        yield
    except BaseException:
        if is_new and results_written() == before:
            shutil.rmtree(folder, ignore_errors=True)
            for parent in parents:
                with contextlib.suppress(OSError):
                    parent.rmdir()
        raise


def wrote_result(path: Path) -> None:
    """Note that ``path`` now has a finished result."""
    _results.append(path)


def results_written() -> int:
    """Return how many times this process has written a finished result."""
    return len(_results)


def is_folder(path: Path) -> bool:
    """Return whether ``path`` is a folder, without the error that Path.is_dir raises for a very long path."""
    return os.path.isdir(path)  # noqa: PTH112


def is_file(path: Path) -> bool:
    """Return whether ``path`` is a regular file, also without an error for a very long path."""
    return os.path.isfile(path)  # noqa: PTH113


def check_regular(path: Path) -> None:
    """Raise an OSError for devices and pipes, which may never end: ``/dev/full`` gives zeros for ever."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError("it is not a regular file")


def read_bytes(path: Path, option: str, advice: str, largest: int = _LARGEST) -> bytes:
    """Read a regular file of at most ``largest`` bytes."""
    try:
        check_regular(path)
        with path.open("rb") as file:
            content = file.read(largest + 1)
        if len(content) > largest:
            raise OSError(f"it has more than {largest:,} bytes")
        return content
    except OSError as error:
        raise ConfigError(f"{option}: cannot read {path} ({error.strerror or error}); {advice}") from error


def read_text(path: Path, option: str, advice: str, largest: int = _LARGEST) -> str:
    """Read a text in UTF-8, without a byte order mark."""
    content = read_bytes(path, option, advice, largest)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option}: {path} is not UTF-8 text; {advice}") from error


@contextlib.contextmanager
def opened_picture(path: Path, option: str, advice: str) -> Iterator[Image]:
    """Open an image, whose texts and frames can be read within the context."""
    import PIL.Image

    content = io.BytesIO(read_bytes(path, option, advice))
    try:
        with PIL.Image.open(content) as image:
            yield image
    # Besides OSError, Pillow raises these for broken PNG chunks and for suspiciously large images.
    except (OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{option}: cannot read the image {path} (it is not an image); {advice}") from error


def open_picture(path: Path, option: str, advice: str) -> Image:
    """Read an image as RGB."""
    with opened_picture(path, option, advice) as image:
        return image.convert("RGB")


@contextlib.contextmanager
def writing(path: Path, option: str, advice: str) -> Iterator[None]:
    """Create the folder of ``path``, and turn an OSError within the context into a ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_regular(path)
        yield
    except OSError as error:
        raise ConfigError(f"{option}: cannot write {path} ({error.strerror or error}); {advice}") from error


def write_atomically(
    path: Path, write: Callable[[Path], object], advice: str = FREE_SPACE, is_result: bool = True
) -> None:
    """Let ``write`` write a temporary file beside ``path`` with its suffix, then rename it to ``path``.

    ``is_result`` says whether the file has a finished result, which a user wants to keep.
    """
    with writing(path, "out", advice):
        descriptor, name = tempfile.mkstemp(suffix=path.suffix, prefix=f".{path.stem}-", dir=path.parent)
        os.close(descriptor)
        unfinished = Path(name)
        try:
            write(unfinished)
            unfinished.chmod(0o644)  # only the owner can read a file of mkstemp
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        if is_result:
            wrote_result(path)


def write_text(path: Path, text: str, advice: str = FREE_SPACE, is_result: bool = True) -> None:
    """Write a text as UTF-8 with :func:`write_atomically`."""

    def write(unfinished: Path) -> None:
        unfinished.write_text(text, encoding="utf-8")

    write_atomically(path, write, advice, is_result)


def write_json(path: Path, value: Any, advice: str = FREE_SPACE, is_result: bool = True) -> None:
    """Write ``value`` as JSON that every reader accepts. NaN and infinite numbers raise a ValueError."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_text(path, text, advice, is_result)


def toml_parser() -> Any:
    """Return the module that reads TOML: ``tomllib``, or ``tomli`` for Python 3.10."""
    try:
        return importlib.import_module("tomllib")
    except ModuleNotFoundError:
        return importlib.import_module("tomli")
