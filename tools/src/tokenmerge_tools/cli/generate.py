"""``tokenmerge generate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tokenmerge.errors import ConfigError
from tokenmerge_tools.cli import terminal
from tokenmerge_tools.cli.arguments import takes
from tokenmerge_tools.generate.parameters import options_like
from tokenmerge_tools.generate.run import generate as run_generate
from tokenmerge_tools.pipelines.loading import quiet_libraries
from tokenmerge_tools.pipelines.options import GenerateOptions


@takes(GenerateOptions)
def generate(
    context: typer.Context,
    prompt: Annotated[
        str | None, typer.Argument(help="What to draw. Default with --like: the prompt of the picture.")
    ] = None,
    *,
    like: Annotated[
        Path | None,
        typer.Option(
            help="PNG file that this command or a web UI wrote. Prompt, seed, size, steps, guidance, "
            "scheduler, bundled model and token merging are those of the picture, except for options given."
        ),
    ] = None,
    details: Annotated[
        bool, typer.Option("--details", help="Also print memory, all settings, and how much the times vary.")
    ] = False,
    given: dict[str, Any],
) -> None:
    """Draw pictures with and without tokenmerge from the same seeds, and compare them.

    This prints times, speed-up and closeness. It writes the pictures, comparison.png with both side by side,
    and run.json. Calls with and without tokenmerge take turns, and the time is the median.
    """
    if prompt is not None:
        given["prompt"] = prompt
    quiet_libraries("tokenmerge generate")
    if like is not None:
        sources = {name: context.get_parameter_source(name) for name in context.params}
        named = {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}
        given, notes = options_like(like, given, named)
        for note in notes:
            terminal.say(f"note: {note}")
    if "prompt" not in given:
        raise ConfigError('prompt: say what to draw, such as "a red apple", or give a picture with --like')
    options = GenerateOptions(**given)
    with terminal.progress_bars("steps") as on_progress:
        result = run_generate(options, on_progress, terminal.say_what, terminal.say_where)
    print("\n".join(terminal.result_lines(result, options)))
    if result.steps is not None:
        print(result.steps)
    if details:
        print("\n".join(terminal.details(result)))
