"""``tokenmerge report``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tokenmerge.errors import ConfigError
from tokenmerge_tools.failures import errors_as
from tokenmerge_tools.files import write_text
from tokenmerge_tools.records.file import read_results
from tokenmerge_tools.reporting.page import as_html, content_of


def report(
    results: Annotated[
        list[Path] | None,
        typer.Argument(help="Files that tokenmerge bench and evaluate wrote, or their folders."),
    ] = None,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="The page, a .html file."),
    ] = Path("outputs/report.html"),
) -> None:
    """Make an HTML page with tables, plots and images from results.

    The page needs no network and no other file.
    """
    if out.suffix != ".html":
        raise ConfigError(f"out: expected a file ending in .html, got {out}")
    strange = "a record lacks a value or has a strange one"
    advice = "give files that tokenmerge bench or evaluate wrote"
    with errors_as(lambda reason: ConfigError(f"results: {strange} ({reason}); {advice}")):
        content = content_of(read_results(results or []))
        page = as_html(content)
    for note in content.notes:
        print(f"note: {note}", file=sys.stderr)
    write_text(out, page)
    print(out)
