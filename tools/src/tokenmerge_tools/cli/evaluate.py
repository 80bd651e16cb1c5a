"""``tokenmerge evaluate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from tokenmerge_tools.cli import terminal
from tokenmerge_tools.cli.arguments import ABOUT, takes
from tokenmerge_tools.cli.merging import spec_of_file
from tokenmerge_tools.evaluate.evaluation import OF_PRESET, EvaluateOptions
from tokenmerge_tools.evaluate.evaluation import dry_run as count_work
from tokenmerge_tools.evaluate.runner import evaluate as run_evaluate
from tokenmerge_tools.pipelines.loading import quiet_libraries
from tokenmerge_tools.pipelines.options import option
from tokenmerge_tools.reporting.tables import quality_tables


@takes(EvaluateOptions)
def evaluate(
    given: dict[str, Any],
    settings: Annotated[
        list[Path] | None,
        option(
            "Compared",
            "File of settings, such as that of tokenmerge tune, as another variant. May be repeated.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, option("Running", "Only print how many pictures and hours it takes.", "--dry-run")
    ] = False,
    seconds_per_picture: Annotated[
        float | None,
        option(
            "Running",
            "For --dry-run: seconds of a dense picture. Default: those of an earlier run.",
            parser="number",
        ),
    ] = None,
) -> None:
    """Measure closeness to dense and speed-up on many pictures, drawn dense and merged from the same seeds.

    Each picture is timed, so that tokenmerge report can draw the price curve from this one run. The variant
    fewer-steps is a dense run with as many steps as each other variant counts operations.

    All metrics are loaded before the first picture: you see which weights are downloaded, and a metric that
    cannot work here raises an error. After Ctrl-C, finished pictures are kept; run the same command again to
    continue. For videos, picture metrics are means over the frames, and the motion is compared with dense.
    """
    given = {**(OF_PRESET if "preset" in given else {}), **given}
    if settings:
        about: dict[str, Any] = {name: given.get(name) for name in ABOUT}
        own = (spec_of_file(file, {}, **about).text for file in settings)
        given["variants"] = (*given.get("variants", ()), *own)
    options = EvaluateOptions(**given)
    quiet_libraries("tokenmerge evaluate")
    if dry_run:
        print("\n".join(count_work(options, seconds_per_picture)))
        return
    with terminal.progress_bars("pictures") as on_progress:
        records = run_evaluate(options, on_progress, on_note=lambda note: terminal.say(f"note: {note}"))
    (table,) = quality_tables(records)
    terminal.show(table, f"written to {options.out}; next: tokenmerge report {options.out.parent}")
