"""Which version of this package's source is measured."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

__all__ = ["source_commit"]

_SOURCE = Path(__file__).parent.parent


def source_commit() -> str | None:
    """The commit that last changed the package, with ``+changes`` where files differ from it.

    Returns:
        None outside a git checkout. Commits that touch other files do not show: they change no figure.
    """
    if shutil.which("git") is None:
        return None
    commit = _git("log", "-1", "--format=%h", "--", ".")
    if not commit:
        return None
    return f"{commit}+changes" if _git("status", "--porcelain", "--", ".") else commit


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_SOURCE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
