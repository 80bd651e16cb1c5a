"""Tables, progress bars and messages of the commands."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from statistics import median

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

from tokenmerge.plans import looks
from tokenmerge.plans.generation import StepKind
from tokenmerge.report import in_words
from tokenmerge.report.notes import KIND_OF_SIGN
from tokenmerge.report.summary import CLOSENESS
from tokenmerge_tools import demo
from tokenmerge_tools.drawing import Progress
from tokenmerge_tools.generate.run import Result
from tokenmerge_tools.pipelines.options import GenerateOptions
from tokenmerge_tools.reporting.tables import Table as PlainTable

# Pipes and files have no width, so tables are as wide as their content.
_NO_EDGE = 10_000
_SECONDS_BETWEEN_LINES = 30
# A run is called faster by the clock than by operations when it is faster by more than this.
_FASTER_THAN_BY_OPERATIONS = 1.1
_ABOUT_AS_LONG = 1.1  # times that differ by a smaller factor are about the same
_CLOSENESS = f"  {CLOSENESS}: "  # how the line about closeness begins in a summary
_LOOK = "At 40 dB, images are hard to tell apart; at 35 small details differ, at 30 larger ones, at 25 many"


def show(plain: PlainTable, *lines: str) -> None:
    """Print a table, its notes and other lines. Lines are not wrapped if the output is not a terminal."""
    console = Console(width=None if sys.stdout.isatty() else _NO_EDGE)
    table = Table(title=Text(plain.title), title_justify="left")
    for number, name in enumerate(plain.header):
        words = number < plain.words
        table.add_column(name, justify="left" if words else "right", overflow="fold")
    for row in plain.rows:
        table.add_row(*map(Text, row.cells))
    console.print(table)
    for line in (*(f"note: {note}" for note in plain.notes), *lines):
        console.print(Text(line))


@contextlib.contextmanager
def progress_bars(unit: str) -> Iterator[Callable[[Progress], None]]:
    """Show a bar on stderr for each part of a run. Yield the function that updates the bars.

    The unit names the counted things, in the plural. If stderr is not a terminal, a line is printed there
    from time to time.
    """
    if not sys.stderr.isatty():
        yield _in_lines(unit)
        return
    columns = (TextColumn("{task.description:>7}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    bars = Bars(
        *columns,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        redirect_stdout=sys.stdout.isatty(),  # a file gets its lines directly
    )
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


def _in_lines(unit: str, clock: Callable[[], float] = time.monotonic) -> Callable[[Progress], None]:
    """Return a function that prints the progress on stderr, about every half minute and when a part ends."""
    last = clock()

    def move(progress: Progress) -> None:
        nonlocal last
        if progress.done == progress.total or clock() - last >= _SECONDS_BETWEEN_LINES:
            last = clock()
            say(f"{progress.part}: {progress.done} of {progress.total} {unit} done")

    return move


def working(what: str) -> contextlib.AbstractContextManager[object]:
    """Show on stderr, if it is a terminal, what is running within the context."""
    return Console(stderr=True).status(f"{what} …")


def say(text: str) -> None:
    """Print a line to stderr immediately."""
    print(text, file=sys.stderr, flush=True)


def say_what(options: GenerateOptions) -> None:
    """Print what a run is going to draw."""
    width, height = options.size or (0, 0)
    bundled = " (bundled)" if options.model in demo.NAMES else ""
    print(
        f'Drawing "{options.prompt}", {width} × {height} pixels, {options.steps} steps, '
        f"with {options.model}{bundled}",
        flush=True,
    )


def result_lines(result: Result, options: GenerateOptions) -> list[str]:
    """Write a few lines about a run, for somebody who sees such results for the first time."""
    names = {"dense": f"dense, {options.steps} steps", "tokenmerge": "with tokenmerge"}
    close = {"dense": "the unchanged model", "tokenmerge": _close_to_dense(result) if result.psnr else ""}
    rows = [(names[name], median(result.seconds(name)), close.get(name, "")) for name in result.names]
    if (lost := result.fewer_psnr) is not None:
        close_to = f"{lost:.1f} dB to dense: {looks(math.floor(lost))}"
        rows.append((f"dense, {result.fewer_steps} steps", result.fewer_seconds, close_to))
    lines = [""]
    for name, seconds, closeness in rows:
        gain = f"{rows[0][1] / seconds:.1f}×" if name != rows[0][0] else "    "
        lines.append("  ".join((f"  {name:<16}", f"{_seconds(seconds):>7}", gain, closeness)).rstrip())
    lines += ["", f"  {result.missing or _LOOK}"]
    finite = [value for value in result.psnr if math.isfinite(value)]
    if result.fewer_psnr is not None and finite:
        lead = round(sum(finite) / len(finite), 1) - round(result.fewer_psnr, 1)  # as printed above
        fewer = f"{result.fewer_steps} dense steps"
        took = _beside(result.fewer_seconds, median(result.seconds("tokenmerge")))
        if lead > 0:
            lines.append(f"  {lead:.1f} dB closer with tokenmerge than with {fewer}, which took {took}")
        else:
            lines.append(f"  {abs(lead):.1f} dB closer with {fewer} than with tokenmerge; they took {took}")
    lines += [f"  {_about_times(rows, result, options)}", ""]
    ran, merged = _what_ran(result, options.steps)
    of_fewer = []
    if result.fewer_steps is not None:
        speedup = options.steps / result.fewer_steps
        of_fewer.append(f"               {speedup:.2f}× by operations with {result.fewer_steps} dense steps")
    lines += [
        f"  Counted:     {result.report.speedup:.2f}× by operations",
        *of_fewer,
        f"               {ran}",
        f"               {merged}; cache: {in_words(result.report.kept_bytes)}",
    ]
    found = f". Measured here: {sum(finite) / len(finite):.1f} dB" if finite else ""
    for line in result.summary.splitlines():
        if line.startswith(_CLOSENESS):
            lines.append(f"  Closeness:   {line.removeprefix(_CLOSENESS)}{found}")
        if line.startswith(("  warning", "  min_psnr")):
            lines.append(line)
    if options.min_psnr is not None and options.merging.tuned_file is None:
        measure = f"tokenmerge tune --model {options.model} --min-psnr {options.min_psnr:g}"
        lines.append(f"  How far off? {measure} measures it on this model")
    example = '  Your model:  tokenmerge generate "a castle" --model owner/name'
    lines.append("")
    if options.model in demo.NAMES:
        lines.append(example)
    if argument := options.merging.argument:
        tolerance = "" if options.min_psnr is None else f", min_psnr={options.min_psnr:g}"
        lines.append(f"  In Python:   tokenmerge.apply_token_merging(pipe, {argument}{tolerance})")
    return lines


def _beside(seconds: float, others: float) -> str:
    """Describe how long something took, compared with something else.

    >>> _beside(5.2, 5.0), _beside(59.0, 35.0)
    ('about as long', '1.7 times as long')
    """
    if max(seconds, others) <= _ABOUT_AS_LONG * min(seconds, others):
        return "about as long"
    return f"{seconds / others:.1f} times as long"


def _about_times(rows: list[tuple[str, float, str]], result: Result, options: GenerateOptions) -> str:
    """Say how reliable the seconds in the rows are."""
    if options.repeat > 1:
        return f"Medians of {options.repeat} timed runs each."
    once = "Seconds of one run each; --repeat 3 makes them reliable."
    if len(rows) > 1:
        (_, dense, _), (_, merged, _) = rows[:2]
        if dense > _FASTER_THAN_BY_OPERATIONS * result.report.speedup * merged:
            slowed = (
                "Faster by the clock than by operations, probably as other programs slowed the first run."
            )
            return f"{slowed} {once}"
    return once


def _close_to_dense(result: Result) -> str:
    """Say how close the images are, and what that means."""
    finite = [value for value in result.psnr if math.isfinite(value)]  # equal images have an infinite PSNR
    if not finite:
        return "the images are identical"
    same = len(result.psnr) - len(finite)
    mean = sum(finite) / len(finite)
    psnr = f"{mean:.1f} dB to dense: {looks(math.floor(mean))}"
    return f"{psnr}; {same} identical" if same else psnr


def _what_ran(result: Result, steps: int) -> tuple[str, str]:
    """Say how many steps of each kind ran, and how many tokens merged."""
    plan = result.report.step_signs
    rows = result.report.rows
    count = Counter(KIND_OF_SIGN[sign] for sign in plan)
    if count[StepKind.FULL] < len(plan):
        ran = f"{count[StepKind.FULL]} of {steps} steps were full"
    else:
        ran = "every step was full"
    if count[StepKind.SHALLOW]:
        ran += f", {count[StepKind.SHALLOW]} were shallow"
    if count[StepKind.SKIPPED]:
        ran += f", {count[StepKind.SKIPPED]} were skipped"
    merging = [row for row in rows if row.merged_tokens < row.tokens]
    if not merging:
        return ran, "no tokens merged"
    most = max(merging, key=lambda row: row.tokens)
    return ran, f"{most.tokens} tokens merged to {most.merged_tokens}, in {len(merging)} blocks"


def details(result: Result) -> list[str]:
    """Write the times and the memory of each variant, what merging did, and what the numbers mean."""
    c = result.conditions
    size = f"{c['pipeline']}, {c['width']} x {c['height']}, {c['options']['steps']} steps"
    lines = ["", f"{size}, batch {result.batch}, {c['dtype']} on {c['device']}"]
    for name in result.names:
        times = result.seconds(name)
        memory = result.peak_bytes(name)
        spread = f" ({_seconds(min(times))} to {_seconds(max(times))})" if len(times) > 1 else ""
        peak = "" if memory is None else f", peak memory {memory / 2**20:,.0f} MiB"
        lines.append(f"{name}: {_seconds(median(times))} per image{spread}{peak}")
    runs = len(result.seconds("tokenmerge"))
    return [
        *lines,
        *result.summary.splitlines(),
        f"times: median of {runs} pipeline call{'s' if runs > 1 else ''} after a few untimed steps",
        f"memory: {c['peak_memory']}",
        *(f"note: {note}" for note in result.notes),
    ]


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.{1 if seconds >= 10 else 2}f} s"
