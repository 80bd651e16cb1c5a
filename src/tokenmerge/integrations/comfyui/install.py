"""Writes the folder with the node into ComfyUI's ``custom_nodes``."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from tokenmerge.errors import ConfigError

SOURCE = Path(__file__).parent / "custom_node"
NAME = "comfyui-tokenmerge"


def install(path: str | Path) -> list[Path]:
    """Write the folder ``comfyui-tokenmerge`` into ``custom_nodes``; files of an older one are replaced.

    Args:
        path: ComfyUI's folder, or its ``custom_nodes``.

    Returns:
        The files that were written.

    Raises:
        ConfigError: the path is neither, or a link is in the place of the folder.
    """
    given = Path(path)
    with contextlib.suppress(RuntimeError):  # "~name" of a user that does not exist
        given = given.expanduser()
    folder = given if given.name == "custom_nodes" else given / "custom_nodes"
    if not folder.is_dir():
        raise ConfigError(
            f"path: expected ComfyUI's folder or its folder custom_nodes, got {given}; give the folder that "
            "contains ComfyUI's main.py"
        )
    target = folder / NAME
    if target.is_symlink():
        raise ConfigError(f"path: {target} is a link; remove it, then run this command again")
    files = sorted(file for file in SOURCE.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    written = []
    for file in files:
        written.append(target / file.relative_to(SOURCE))
        written[-1].parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, written[-1])
    return written
