"""Options that several commands share, and how options are grouped in ``--help``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

__all__ = [
    "AsJson",
    "Size",
    "integer",
    "machine",
    "number",
    "option",
    "picture",
]


def number(text: str) -> float:
    """Read a number."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"expected a number, got {text!r}.") from None


def integer(text: str) -> int:
    """Read an integer."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"expected an integer, got {text!r}.") from None


def picture(help: str, *names: str, parser: Callable[[str], Any] | None = None) -> Any:
    """An option that says what to draw."""
    return option("Picture", help, *names, parser=parser)


def machine(help: str, *names: str, parser: Callable[[str], Any] | None = None) -> Any:
    """An option that says how to run."""
    return option("Running", help, *names, parser=parser)


def option(panel: str, help: str, *names: str, parser: Callable[[str], Any] | None = None) -> Any:
    """An option in one panel of ``--help``."""
    metavar = None if parser is None else f"<{parser.__name__}>"
    return typer.Option(*names, help=help, rich_help_panel=panel, parser=parser, metavar=metavar)


Size = Annotated[str | None, picture("WIDTHxHEIGHT or N in pixels. Default: the model's own.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
