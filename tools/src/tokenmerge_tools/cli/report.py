"""``tokenmerge report``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from tokenmerge.errors import ConfigError, TokenMergingError, reason_of
from tokenmerge_tools.files import write_text
from tokenmerge_tools.records.file import read_results
from tokenmerge_tools.reporting.page import as_html, content_of


def report(
    results: Annotated[
        list[Path] | None, typer.Argument(help="Files or folders of tokenmerge bench and evaluate.")
    ] = None,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="The page, a .html file."),
    ] = Path("outputs/report.html"),
) -> None:
    """Make an HTML page with tables, plots and pictures from results.

    The page needs no network and no other file.
    """
    if out.suffix != ".html":
        raise ConfigError(f"out: expected a file ending in .html, got {out}")
    with _strange_values():
        content = content_of(read_results(results or []))
        page = as_html(content)
    for note in content.notes:
        print(f"note: {note}", file=sys.stderr)
    write_text(out, page)
    print(out)


@contextlib.contextmanager
def _strange_values() -> Iterator[None]:
    """Turn the error about a value in a record that no release writes into a ConfigError."""
    try:
        yield
    except TokenMergingError:
        raise
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"results: a record lacks a value or has a strange one ({type(error).__name__}: "
            f"{reason_of(error)}); give files that tokenmerge bench or evaluate wrote"
        ) from error
