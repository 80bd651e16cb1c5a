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
from tokenmerge_tools.reporting.compare import compare, parse_tolerance
from tokenmerge_tools.reporting.content import content_of
from tokenmerge_tools.reporting.render import as_csv, as_html, as_markdown, quality_as_csv

_FORMATS = (".html", ".md", ".csv")


def report(
    results: Annotated[
        list[Path] | None, typer.Argument(help="Files or folders of tokenmerge bench and evaluate.")
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            help="The report. For a .html file, a .md and a .csv file are written too; "
            "a .md or .csv file is written alone.",
        ),
    ] = Path("outputs/report.html"),
    compare_files: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", metavar="A B", help="Print t_B / t_A of each cell instead of a report."),
    ] = None,
    fail_if_slower: Annotated[
        str | None,
        typer.Option(help="With --compare: exit code 1 if a cell is slower by more than this, such as 5%."),
    ] = None,
) -> None:
    """Make tables, plots and pictures from results, as an HTML page, Markdown and CSV.

    The page needs no network and no other file. One CSV file contains all timings, and a second one the
    quality metrics, if there are any.
    """
    if compare_files is not None:
        _compare(*compare_files, fail_if_slower, results)
        return
    if fail_if_slower is not None:
        raise ConfigError("fail-if-slower: it needs --compare A B, the results before and after")
    if out.suffix not in _FORMATS:
        raise ConfigError(f"out: expected a file ending in {', '.join(_FORMATS)}, got {out}")
    whole, texts = out.suffix == ".html", {}
    with _strange_values():
        found = read_results(results or [])
        content = content_of(found)
        if whole:
            texts[out] = as_html(content)
        if whole or out.suffix == ".md":
            texts[out.with_suffix(".md")] = as_markdown(content)
        if whole or out.suffix == ".csv":
            texts[out.with_suffix(".csv")] = as_csv(found.cells)
            if found.quality:
                texts[out.with_name(f"{out.stem}-quality.csv")] = quality_as_csv(found.quality)
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


def _compare(before: Path, after: Path, fail_if_slower: str | None, results: list[Path] | None) -> None:
    if results:
        raise ConfigError(f"compare: expected only two results, got {results[0]} too; leave it out")
    tolerance = None if fail_if_slower is None else parse_tolerance(fail_if_slower)
    with _strange_values():
        comparison = compare(read_results([before]).cells, read_results([after]).cells)
    for change in comparison.changes:
        print(change)
    for name in comparison.only_before:
        print(f"{name}: only in {before}")
    for name in comparison.only_after:
        print(f"{name}: only in {after}")
    if tolerance is not None and (slower := comparison.slower(tolerance)):
        print(f"{len(slower)} of {len(comparison.changes)} cells are slower by more than {fail_if_slower}")
        raise typer.Exit(1)
