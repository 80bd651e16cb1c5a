"""``tokenmerge tune``."""

from __future__ import annotations

from typing import Any

import typer

from tokenmerge_tools.cli import terminal
from tokenmerge_tools.cli.arguments import takes
from tokenmerge_tools.pipelines.loading import quiet_libraries
from tokenmerge_tools.tune.options import TuneOptions
from tokenmerge_tools.tune.result import answer, tuned_table, write_result
from tokenmerge_tools.tune.runner import tune as run_tune

GOAL_NOT_REACHED = 3


@takes(TuneOptions)
def tune(*, given: dict[str, Any]) -> None:
    """Find the highest speed that stays close enough to dense, on your model and prompts.

    It draws a few prompts dense, and then with the default method at a few speeds. The answer is the highest
    speed at which 9 of 10 prompts keep the closeness. Each speed is drawn beside fewer steps of the same
    time. With --speedup, it measures that speed instead. The file records how far the estimates were off on
    this model. They are corrected when the file is applied. After Ctrl-C, the results so far are printed; run
    the same command again to continue. The exit code is 3 if no speed keeps the goal, or the speed cannot be
    reached.
    """
    options = TuneOptions(**given)
    quiet_libraries("tokenmerge tune")
    with terminal.progress_bars("images") as on_progress:
        tuning = run_tune(options, on_progress, on_note=lambda note: terminal.say(f"note: {note}"))
    if not tuning.speeds:
        terminal.say("no speed was drawn with all prompts yet; run the same command again to continue")
        raise KeyboardInterrupt
    write_result(tuning)
    terminal.show(
        tuned_table(tuning),
        answer(tuning),
        f"file: {options.out}",
        f"images: {options.strip}",
        f"records: {options.records}",
        f"in Python: tokenmerge.apply_token_merging(pipe, {str(options.out)!r})",
    )
    if not tuning.complete:
        raise KeyboardInterrupt
    if not tuning.reaches:
        raise typer.Exit(GOAL_NOT_REACHED)
