"""Writes the folder with the node into ComfyUI's ``custom_nodes``."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenmerge.errors import ConfigError
from tokenmerge.origin import checkout

SOURCE = Path(__file__).parent / "custom_node"
NAME = "comfyui-tokenmerge"
AFTERWARDS = (
    "Install tokenmerge in ComfyUI's Python too, and restart ComfyUI. Then right click → Add Node → "
    "model_patches → tokenmerge → Token Merging. Two workflows are under Templates."
)
_REQUIREMENTS = Path("requirements.txt")
# The line of pyproject.toml by which a folder is known as one of this node.
_OURS = b'PublisherId = "tokenmerge"'


def install(path: str | Path) -> list[Path]:
    """Write the folder ``comfyui-tokenmerge`` into ``custom_nodes``. Files of an older one are replaced.

    ``requirements.txt``, from which ComfyUI's manager installs the library, names the checkout if this
    library was installed from one, and else the release.

    The path is that of ComfyUI's folder, or of its ``custom_nodes``. Everything is checked and copied to a
    temporary folder first, so a failure leaves the folder as it was. It returns the files that it wrote.

    Raises:
        ConfigError: the path is another one, the folder holds files that are not of this node, a link is in
            the place of the folder or of something in it, or the folder cannot be written.
    """
    # The methods of Path raise for an unknown user and for a path that is too long.
    given = Path(os.path.expanduser(path))  # noqa: PTH111
    folder = given if given.name == "custom_nodes" else given / "custom_nodes"
    if not os.path.isdir(folder):  # noqa: PTH112
        raise ConfigError(
            f"path: expected ComfyUI's folder or its folder custom_nodes, got {given}; give the folder that "
            "contains ComfyUI's main.py"
        )
    target = folder / NAME
    sources = (file for file in SOURCE.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    files = sorted(file.relative_to(SOURCE) for file in sources)
    try:
        problem = next(_problems(target, files), None)
        if problem:
            raise ConfigError(f"path: {problem}, then run this command again")
        # ComfyUI loads nothing from a folder with this ending.
        with tempfile.TemporaryDirectory(prefix=f"{NAME}-", suffix=".disabled", dir=folder) as unfinished:
            made = Path(unfinished) / NAME
            for file in files:
                (made / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(SOURCE / file, made / file)
            root = checkout()
            if root is not None:
                (made / _REQUIREMENTS).write_text(f"tokenmerge @ {root.as_uri()}\n", encoding="utf-8")
            if target.exists():
                for file in files:
                    (target / file).parent.mkdir(exist_ok=True)
                    (made / file).replace(target / file)
            else:
                made.rename(target)
    except OSError as error:
        raise ConfigError(
            f"path: cannot write {target} ({error.strerror or error}); make {folder} writable and free some "
            "space, then run this command again"
        ) from error
    return [target / file for file in files]


def _problems(target: Path, files: Sequence[Path]) -> Iterator[str]:
    """Yield what is in the place of the folder or of something in it, and what to do about that."""
    parts = {file.parent for file in files} | set(files)
    for place in (target, *sorted(target / part for part in parts)):
        if place.is_symlink() or getattr(os.path, "isjunction", lambda _: False)(place):
            yield f"{place} is a link; remove it"
        if place.exists() and place.is_dir() == (place.relative_to(target) in files):
            yield f"{place} is in the way; move it to another place"
    if target.exists() and any(target.iterdir()):
        facts = target / "pyproject.toml"
        if not facts.exists() or _OURS not in facts.read_bytes().splitlines():
            yield f"{target} holds files that are not of this node; move it to another place"


def main(arguments: Sequence[str]) -> int:
    """Install the node from the command line, where only this package is installed; return the exit code."""
    if len(arguments) != 1:
        print("usage: python -m tokenmerge.integrations.comfyui.install PATH_OF_COMFYUI", file=sys.stderr)
        return 2
    try:
        files = install(arguments[0])
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(*(f"wrote {file}" for file in files), AFTERWARDS, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
