"""``tokenmerge generate``."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from tokenmerge_tools.cli import terminal
from tokenmerge_tools.cli.arguments import takes
from tokenmerge_tools.generate.run import generate as run_generate
from tokenmerge_tools.pipelines.loading import quiet_libraries
from tokenmerge_tools.pipelines.options import GenerateOptions


@takes(GenerateOptions)
def generate(
    prompt: Annotated[str, typer.Argument(help='What to draw, such as "a red apple".')],
    *,
    details: Annotated[
        bool, typer.Option("--details", help="Also print memory, all settings, and how much the times vary.")
    ] = False,
    given: dict[str, Any],
) -> None:
    """Draw images with and without tokenmerge from the same seeds, and compare them.

    This prints times, speed-up and closeness. It writes the images, comparison.png with all of them,
    and run.json. Calls with and without tokenmerge take turns, and the time is the median.
    """
    quiet_libraries("tokenmerge generate")
    options = GenerateOptions(prompt=prompt, **given)
    with terminal.progress_bars("steps") as on_progress:
        say_where = partial(print, "Compare them:", flush=True)
        result = run_generate(options, on_progress, terminal.say_what, say_where)
    print("\n".join(terminal.result_lines(result, options)))
    print("\n".join(terminal.details(result)) if details else "  More:        --details")
    if result.steps is not None:
        print(f"\nThe steps of a further run, to record them:\n{result.steps}")
