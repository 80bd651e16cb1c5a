"""``tokenmerge generate``."""

from __future__ import annotations

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
        bool, typer.Option("--details", help="Also print the spread of times, memory, and all settings.")
    ] = False,
    given: dict[str, Any],
) -> None:
    """Generate pictures with and without merging from the same seeds; measure time, memory and closeness.

    This writes the pictures, a comparison picture and run.json. Times are medians of interleaved pipeline
    calls after a few untimed steps.
    """
    quiet_libraries("tokenmerge generate")
    options = GenerateOptions(prompt=prompt, **given)
    with terminal.progress_bars("steps") as on_progress:
        result = run_generate(options, on_progress, terminal.say_what, terminal.say_where)
    print("\n".join(terminal.result_lines(result, options)))
    if result.steps is not None:
        print(result.steps)
    if details:
        print("\n".join(terminal.details(result)))
