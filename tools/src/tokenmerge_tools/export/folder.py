"""A new folder that appears with all its files or not at all."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tokenmerge.errors import ConfigError


def check_new(folder: Path) -> None:
    """Check that a folder does not exist yet, or is empty."""
    try:
        taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise _refused(folder, error) from error
    if taken:
        raise ConfigError(
            f"out: {folder} exists already, and is not overwritten; remove it, or choose another folder with "
            "--out"
        )


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to fill. It gets its name when the context ends, and is removed after an exception.

    If the process is killed, ``.NAME-unfinished-…`` is left beside the folder.
    """
    check_new(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-unfinished-", dir=folder.parent))
    except OSError as error:
        raise _refused(folder, error) from error
    try:
        yield unfinished
        check_new(folder)
        unfinished.chmod(0o755)  # mkdtemp makes folders that only their owner can read
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()
        unfinished.replace(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _refused(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"out: cannot write to {folder} ({error.strerror or error}); choose another folder with --out"
    )
