"""``tokenmerge tune``."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tokenmerge_tools.cli import terminal
from tokenmerge_tools.cli.arguments import takes
from tokenmerge_tools.pipelines.loading import quiet_libraries
from tokenmerge_tools.pipelines.options import option
from tokenmerge_tools.tune.goal import GOAL_METRICS, Goal, TuneOptions, parse_goal, parse_seconds
from tokenmerge_tools.tune.result import python_lines, tuned_table, write_result
from tokenmerge_tools.tune.runner import Search, TuneProgress
from tokenmerge_tools.tune.runner import tune as run_tune

GOAL_NOT_REACHED = 3
_FEWEST_OF_A_SEARCH = 4

_goal = partial(option, "Goal", parser="number")


@takes(TuneOptions)
def tune(
    *,
    min_speedup: Annotated[
        float | None, _goal("Find the closest settings that are at least this many times faster.")
    ] = None,
    min_psnr: Annotated[
        float | None, _goal("Find the fastest settings with at least this mean PSNR, in dB.")
    ] = None,
    min_ssim: Annotated[float | None, _goal("The same with at least this mean SSIM.")] = None,
    max_lpips: Annotated[float | None, _goal("The same with at most this mean LPIPS.")] = None,
    given: dict[str, Any],
    within: Annotated[
        str, option("Search", "How long to measure, such as 90s, 10min or 1h. Continued runs count too.")
    ] = "10min",
) -> None:
    """Find the closest settings at a wanted speed, or the fastest at a wanted closeness.

    Every setting draws the same prompts from the same seeds as dense, and is timed interleaved with it. Bad
    settings are dropped after a few prompts. Fewer steps and the installed block caches are measured for
    comparison. Ctrl-C stops early and reports what was found; run the same command again to continue. The
    exit code is 3 if no setting reaches the goal.
    """
    bounds = dict(zip(GOAL_METRICS, (min_psnr, min_ssim, max_lpips), strict=True))
    metric = given.get("metric")
    goal = parse_goal(min_speedup, bounds, metric and metric.partition("=")[0])
    options = TuneOptions(goal=goal, within=parse_seconds(within), **given)
    quiet_libraries("tokenmerge tune")
    with _progress(options.goal) as on_progress:
        search = run_tune(options, on_progress, on_note=lambda note: terminal.say(f"note: {note}"))
    if search.decision is not None:
        _report(search)
    elif search.complete:
        terminal.say("no setting can be measured here, as the notes say; change --size, --steps or --model")
    elif search.looks:
        terminal.say("only settings for comparison were measured; run the same command again to continue")
    else:
        terminal.say(
            "no setting was measured, and the same command begins again; let it run until one picture is "
            "drawn dense and with a setting"
        )
    if not search.complete:
        raise KeyboardInterrupt
    if search.decision is None or not search.decision.reached:
        raise typer.Exit(GOAL_NOT_REACHED)


def _report(search: Search) -> None:
    decision = search.decision
    assert decision is not None
    written = write_result(search)
    table = tuned_table(search)
    if not decision.reached:
        verdict = f"no setting reaches {search.goal}; the nearest is {decision.name}"
    else:
        verdict = f"{decision.name} reaches {search.goal}"
        looks = [look for look in search.looks if look.name == decision.name]
        if len(looks) == 1:
            verdict += " on one picture, which is not enough to be sure; raise --within"
        elif not decision.sure:
            verdict += ", but only within the noise; raise --within to be surer"
    spent = [look.cost for look in search.looks if look.name in search.configs]
    tried = {look.name for look in search.looks if look.name in search.configs}
    if search.complete and len(tried) < min(_FEWEST_OF_A_SEARCH, len(search.configs)):
        enough = math.ceil(statistics.mean(spent) * 2 * len(search.configs) / 60)
        were = "settings was" if len(tried) == 1 else "settings were"
        verdict = (
            f"Not enough time: only {len(tried)} of {len(search.configs)} {were} tried, so this is no "
            f"search. Give --within {enough}min, or take the default method: "
            f"tokenmerge.apply_token_merging(pipe, speedup={search.goal.speedup or 1.5:g}). {verdict}"
        )
    terminal.show(
        terminal.as_rich(table),
        *(f"note: {note}" for note in table.notes),
        verdict,
        *written,
        f"records: {search.options.records}",
        f"in Python: {python_lines(search)}",
    )


@contextlib.contextmanager
def _progress(goal: Goal) -> Iterator[Callable[[TuneProgress], None]]:
    """Show a bar on stderr with the time that is spent and the best setting so far."""
    columns = (BarColumn(bar_width=20), TimeElapsedColumn(), TextColumn("{task.description}"))
    bar = Progress(*columns, console=Console(stderr=True))
    task = bar.add_task("preparing", total=None)

    def move(progress: TuneProgress) -> None:
        best = progress.best
        so_far = "nothing measured yet"
        if best is not None:
            closeness = f"{goal.metric} {goal.closeness(best.closeness):.4g}"
            so_far = f"best so far: {best.name}, {best.speedup:.2f}×, {closeness}"
        text = f"{so_far} · now: {progress.running}".replace("[", r"\[")
        bar.update(task, description=text, completed=progress.spent, total=progress.budget)

    with bar:
        yield move
