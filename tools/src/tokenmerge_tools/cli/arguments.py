"""Options that several commands share, grouped by the panels of ``--help``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from tokenmerge_tools.pipelines.settings import ATTENTION_HELP, DTYPE_CHOICES, SCHEDULER_NAMES


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
    """Return an option of the panel “Picture”."""
    return option("Picture", help, *names, parser=parser)


def machine(help: str, *names: str, parser: Callable[[str], Any] | None = None) -> Any:
    """Return an option of the panel “Running”."""
    return option("Running", help, *names, parser=parser)


def option(panel: str, help: str, *names: str, parser: Callable[[str], Any] | None = None) -> Any:
    """Make an option in one panel of ``--help``."""
    metavar = None if parser is None else f"<{parser.__name__}>"
    return typer.Option(*names, help=help, rich_help_panel=panel, parser=parser, metavar=metavar)


Model = Annotated[
    str, typer.Option(help="Bundled model, diffusers folder, .safetensors checkpoint or hub id.")
]
Size = Annotated[str | None, picture("WIDTHxHEIGHT, or N for a square, in pixels. Default: the model's own.")]
Steps = Annotated[int, picture("Denoising steps.", parser=integer)]
Scheduler = Annotated[
    str | None,
    picture(f"{', '.join(SCHEDULER_NAMES)}, or a class name in diffusers. Default: the model's own."),
]
Guidance = Annotated[float | None, picture("Guidance scale. Default: the pipeline's own.", parser=number)]
Dtype = Annotated[str, machine(f"{', '.join(DTYPE_CHOICES)}.")]
Device = Annotated[str, machine("auto, cpu, cuda, cuda:1 or mps.")]
Attention = Annotated[str, machine(ATTENTION_HELP)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
