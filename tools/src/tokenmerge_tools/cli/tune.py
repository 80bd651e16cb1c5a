"""``tokenmerge tune``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tokenmerge_tools.cli import terminal
from tokenmerge_tools.cli.arguments import takes
from tokenmerge_tools.pipelines.loading import quiet_libraries
from tokenmerge_tools.pipelines.options import option
from tokenmerge_tools.tune.options import TuneOptions, parse_seconds
from tokenmerge_tools.tune.result import tuned_table, verdict, write_result
from tokenmerge_tools.tune.runner import TuneProgress
from tokenmerge_tools.tune.runner import tune as run_tune

GOAL_NOT_REACHED = 3


@takes(TuneOptions)
def tune(
    *,
    given: dict[str, Any],
    within: Annotated[
        str,
        option(
            "Search",
            "How long to measure, such as 90s, 10min or 1h. Earlier runs of the same command count too.",
        ),
    ] = "10min",
) -> None:
    """Measure the default method on your model and prompts, and look for a closer plan of the same speed-up.

    A plan says which steps run the whole model, and how many tokens merge. The search begins with the plan of
    the default method, changes it, and compares the final latents with dense ones of the same seeds. No plan
    that it tries counts more operations. Then the best plan draws prompts that were kept back, beside dense,
    the default method and fewer steps, and each call is timed. On the bundled models, short searches found no
    closer plan. After Ctrl-C, the results so far are printed; run the same command again to continue. The
    exit code is 3 if the speed-up cannot be reached.
    """
    options = TuneOptions(within=parse_seconds(within), **given)
    quiet_libraries("tokenmerge tune")
    with _progress() as on_progress:
        search = run_tune(options, on_progress, on_note=lambda note: terminal.say(f"note: {note}"))
    if not search.tried and not search.looks and not search.complete:
        terminal.say("nothing was compared yet; run the same command again to continue")
        raise KeyboardInterrupt
    table = tuned_table(search)
    write_result(search)
    terminal.show(
        table,
        verdict(search),
        f"plan: {options.out}",
        f"records: {options.records}",
        f"in Python: tokenmerge.apply_token_merging(pipe, {str(options.out)!r})",
    )
    if not search.complete:
        raise KeyboardInterrupt
    if not search.reaches:
        raise typer.Exit(GOAL_NOT_REACHED)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[TuneProgress], None]]:
    """Show a bar on stderr with the time that is spent and the best plan so far."""
    columns = (BarColumn(bar_width=20), TimeElapsedColumn(), TextColumn("{task.description}"))
    bar = Progress(*columns, console=Console(stderr=True))
    task = bar.add_task("preparing", total=None)

    def move(progress: TuneProgress) -> None:
        # An opening bracket would begin a style of rich.
        text = f"best so far: {progress.best} · now: {progress.running}".replace("[", r"\[")
        bar.update(task, description=text, completed=progress.spent, total=progress.budget)

    with bar:
        yield move
