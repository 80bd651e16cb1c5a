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
        bool, option("Running", "Only print how many images and hours it takes.", "--dry-run")
    ] = False,
    seconds_per_picture: Annotated[
        float | None,
        option(
            "Running",
            "For --dry-run: how long a dense image takes. Default: as long as in an earlier run.",
            parser="number",
        ),
    ] = None,
) -> None:
    """Measure how close to dense and how fast methods are, on many images.

    A variant is a method with its settings. Each prompt is drawn dense and by every variant, from the same
    seed. The variant fewer-steps draws dense images in fewer steps. For each other variant, it takes the
    number of steps that needs the same operations. Each image is timed, so that tokenmerge report can plot
    closeness over speed.

    Metrics are loaded first. A message says which weights are downloaded, and a metric that cannot work here
    is an error. After Ctrl-C, run the same command again to continue. For videos, metrics are means over the
    frames, and the motion is compared with dense.
    """
    given = {**(OF_PRESET if "preset" in given else {}), **given}
    if settings:
        about: dict[str, Any] = {name: given.get(name) for name in ABOUT}
        variants_of_files = (spec_of_file(file, {}, **about).text for file in settings)
        given["variants"] = (*given.get("variants", ()), *variants_of_files)
    options = EvaluateOptions(**given)
    quiet_libraries("tokenmerge evaluate")
    if dry_run:
        print("\n".join(count_work(options, seconds_per_picture)))
        return
    with terminal.progress_bars("images") as on_progress:
        records = run_evaluate(options, on_progress, on_note=lambda note: terminal.say(f"note: {note}"))
    (table,) = quality_tables(records)
    terminal.show(table, f"written to {options.out}; next: tokenmerge report {options.out.parent}")
