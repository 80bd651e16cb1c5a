"""Options that several commands share, and how options are grouped in ``--help``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

__all__ = [
    "AsJson",
    "MaxDownsample",
    "MergeAttn",
    "MergeCrossattn",
    "MergeMlp",
    "Rand",
    "Ratio",
    "Size",
    "StrideX",
    "StrideY",
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


def _merging(help: str, *names: str, parser: Callable[[str], Any] | None = None) -> Any:
    return option("Merging", help, *names, parser=parser)


def option(panel: str, help: str, *names: str, parser: Callable[[str], Any] | None = None) -> Any:
    """An option in one panel of ``--help``."""
    metavar = None if parser is None else f"<{parser.__name__}>"
    return typer.Option(*names, help=help, rich_help_panel=panel, parser=parser, metavar=metavar)


Ratio = Annotated[float, _merging("Fraction of tokens removed, from 0 to 1 - 1/(sx*sy).", parser=number)]
MaxDownsample = Annotated[
    int, _merging("Deepest level that merges: 1, 2, 4 or 8. SDXL needs 2.", parser=integer)
]
StrideX = Annotated[int, _merging("Width in tokens of a cell with one destination.", "--sx", parser=integer)]
StrideY = Annotated[int, _merging("Height in tokens of such a cell.", "--sy", parser=integer)]
Rand = Annotated[bool, _merging("Draw the destination of each cell at random.", "--rand/--no-rand")]
MergeAttn = Annotated[bool, _merging("Merge around self-attention.", "--merge-attn/--no-merge-attn")]
MergeCrossattn = Annotated[bool, _merging("Merge around cross-attention too.", "--merge-crossattn")]
MergeMlp = Annotated[bool, _merging("Merge around the feed-forward layer too.", "--merge-mlp")]
Size = Annotated[str | None, picture("WIDTHxHEIGHT or N in pixels. Default: the model's own.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
