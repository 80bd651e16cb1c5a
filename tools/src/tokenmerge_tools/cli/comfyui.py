"""``tokenmerge comfyui install``."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenmerge.integrations.comfyui import install as folder

commands = typer.Typer(help="Install the node “Token Merging” for ComfyUI.", rich_markup_mode="markdown")


@commands.callback()
def comfyui() -> None:
    """Install the node “Token Merging” for ComfyUI."""


@commands.command()
def install(
    path: Annotated[str, typer.Argument(help="ComfyUI's folder, or its folder custom_nodes.")],
) -> None:
    """Write the node into ComfyUI's custom_nodes, and say what was written."""
    files = folder.install(path)
    for file in files:
        print(f"wrote {file}")
    print(folder.AFTERWARDS)
