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
from tokenmerge_tools.reporting.content import content_of
from tokenmerge_tools.reporting.render import as_html, as_markdown

_FORMATS = (".html", ".md")


def report(
    results: Annotated[
        list[Path] | None, typer.Argument(help="Files or folders of tokenmerge bench and evaluate.")
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            help="The report. For a .html file, a .md file is written too; a .md file is written alone.",
        ),
    ] = Path("outputs/report.html"),
) -> None:
    """Make tables, plots and pictures from results, as an HTML page and Markdown.

    The page needs no network and no other file.
    """
    if out.suffix not in _FORMATS:
        raise ConfigError(f"out: expected a file ending in {', '.join(_FORMATS)}, got {out}")
    texts = {}
    with _strange_values():
        content = content_of(read_results(results or []))
        if out.suffix == ".html":
            texts[out] = as_html(content)
        texts[out.with_suffix(".md")] = as_markdown(content)
    for note in content.notes:
        print(f"note: {note}", file=sys.stderr)
    for path, text in texts.items():
        write_text(path, text)
        print(path)


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
