"""``tokenmerge report``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tokenmerge.errors import ConfigError
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
    found = read_results(results or [])
    content = content_of(found)
    for note in content.notes:
        print(f"note: {note}", file=sys.stderr)
    whole = out.suffix == ".html"
    if whole:
        _write(out, as_html(content))
    if whole or out.suffix == ".md":
        _write(out.with_suffix(".md"), as_markdown(content))
    if whole or out.suffix == ".csv":
        _write(out.with_suffix(".csv"), as_csv(found.cells))
        if found.quality:
            _write(out.with_name(f"{out.stem}-quality.csv"), quality_as_csv(found.quality))


def _write(path: Path, text: str) -> None:
    write_text(path, text)
    print(path)


def _compare(before: Path, after: Path, fail_if_slower: str | None, results: list[Path] | None) -> None:
    if results:
        raise ConfigError(f"compare: expected only two results, got {results[0]} too; leave it out")
    tolerance = None if fail_if_slower is None else parse_tolerance(fail_if_slower)
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
