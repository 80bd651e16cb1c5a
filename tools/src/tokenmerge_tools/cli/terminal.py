"""Tables, progress bars and messages of the commands."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from tokenmerge_tools.drawing import Progress
from tokenmerge_tools.generate.result import Result, VariantResult
from tokenmerge_tools.records.kinds import variant_label
from tokenmerge_tools.reporting.tables import Table as PlainTable

# Pipes and files have no width, so tables are as wide as their content.
_NO_EDGE = 10_000


def show(table: Table, *lines: str) -> None:
    """Print a table and lines below it. Lines are not wrapped if the output is not a terminal."""
    console = Console(width=None if sys.stdout.isatty() else _NO_EDGE)
    console.print(table)
    for line in lines:
        console.print(Text(line))


@contextlib.contextmanager
def progress_bars(unit: str) -> Iterator[Callable[[Progress], None]]:
    """Show a bar on stderr for each part of a run. Yield the function that updates the bars.

    The unit names the counted things, in the plural.
    """
    columns = (TextColumn("{task.description:>7}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    bars = Bars(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True))
    tasks: dict[str, TaskID] = {}

    def move(progress: Progress) -> None:
        bars.start()
        if progress.part not in tasks:
            tasks[progress.part] = bars.add_task(progress.part)
        bars.update(tasks[progress.part], completed=progress.done, total=progress.total)

    try:
        yield move
    finally:
        if tasks:
            bars.stop()


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Show on stderr, if it is a terminal, what is running."""
    with Console(stderr=True).status(f"{what} …"):
        yield


def say(text: str) -> None:
    """Print a line to stderr immediately."""
    print(text, file=sys.stderr, flush=True)


def as_rich(plain: PlainTable) -> Table:
    """Turn a table of a report into one for the terminal."""
    table = Table(title=Text(plain.title), title_justify="left")
    for number, name in enumerate(plain.header):
        words = number < plain.words
        table.add_column(name, justify="left" if words else "right", overflow="fold")
    for row in plain.rows:
        table.add_row(*map(Text, row.cells))
    return table


def result_table(result: Result) -> Table:
    """Make a table of time, speed-up, memory and closeness of each variant."""
    c = result.conditions
    size = f"{c['pipeline']}, {c['width']} x {c['height']}, {c['options']['steps']} steps"
    title = f"{size}, batch {result.batch}, {c['dtype']} on {c['device']}"
    compared = len(result.variants) > 1
    speedup, closeness = (["speed-up"], ["PSNR", "SSIM"]) if compared else ([], [])
    table = _empty(
        title, "variant", "time per image (fastest to slowest)", *speedup, "peak memory", *closeness
    )
    for variant in result.variants:
        times, gain = variant.per_image(result.batch), result.speedup(variant)
        table.add_row(
            variant.name,
            f"{_seconds(times.median)} ({_seconds(times.fastest)} to {_seconds(times.slowest)})",
            *([] if gain is None else [f"{gain:.2f}x"]),
            "n/a" if variant.peak_bytes is None else f"{variant.peak_bytes / 2**20:,.0f} MiB",
            *(_closeness(result, variant) if compared else ()),
        )
    return table


def _empty(title: str, *columns: str) -> Table:
    """Make a table whose first column holds text, and the others numbers."""
    table = Table(title=Text(title), title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    return table


def result_notes(result: Result) -> list[str]:
    """Write the lines below a result table: what its numbers mean, and where the pictures are."""
    runs = len(result.variants[-1].seconds)
    settings = dict(result.conditions["options"]["merging"])
    merged = variant_label(settings.pop("method"), settings)
    compared = "PSNR and SSIM: merged against dense, means over the pictures"
    return [
        f"merged: {merged}",
        f"times: median of {runs} pipeline call{'s' if runs > 1 else ''} after an untimed warm-up",
        f"memory: {result.conditions['peak_memory']}",
        *([compared] if result.quality else []),
        *(f"note: {note}" for note in result.notes),
        f"written to {result.folder}",
    ]


def _closeness(result: Result, variant: VariantResult) -> tuple[str, str]:
    """Format PSNR and SSIM against dense."""
    if variant.name == "dense":
        return "reference", "reference"
    if result.quality is None:
        return "n/a", "n/a"
    ssim = result.quality.ssim
    psnr = [value for value in result.quality.psnr if math.isfinite(value)]  # infinite for equal pictures
    same = len(ssim) - len(psnr)
    closeness = f"{sum(psnr) / len(psnr):.2f} dB" if psnr else "identical"
    return f"{closeness}, {same} identical" if psnr and same else closeness, f"{sum(ssim) / len(ssim):.4f}"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
