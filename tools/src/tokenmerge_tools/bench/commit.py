"""The git commit of the library and the tools, for records."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import tokenmerge
import tokenmerge_tools

_SOURCES = tuple(Path(package.__path__[0]) for package in (tokenmerge, tokenmerge_tools))


def source_commit() -> str | None:
    """Return the last commit that changed the library or the tools.

    If there are local changes, ``+changes-HASH`` follows it.
    Commits that change only other files are skipped, because they cannot change a measurement.

    Returns:
        The commit, or None outside a git checkout. The hash covers local changes and untracked files.
    """
    if shutil.which("git") is None:
        return None
    commit = _git("log", "-1", "--format=%h")
    if not commit:
        return None
    # For a binary file, git diff prints the hash of its content.
    changes = _git("diff", "HEAD", "--no-ext-diff", "--no-color")
    unknown = _git("ls-files", "--others", "--exclude-standard", "-z").split("\0")
    found = hashlib.sha256(changes.encode())
    for name in filter(None, unknown):
        found.update(name.encode() + hashlib.sha256((_SOURCES[0] / name).read_bytes()).digest())
    return f"{commit}+changes-{found.hexdigest()[:8]}" if changes or any(unknown) else commit


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_SOURCES[0]), *arguments, "--", *map(str, _SOURCES)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    return done.stdout.strip()
