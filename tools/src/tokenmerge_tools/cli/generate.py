"""``tokenmerge generate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokenmerge.errors import ConfigError
from tokenmerge_tools.cli import tables
from tokenmerge_tools.cli.arguments import (
    Attention,
    Device,
    Dtype,
    Guidance,
    Model,
    Scheduler,
    Size,
    Steps,
    integer,
    machine,
    picture,
)
from tokenmerge_tools.cli.merging import with_merging_options
from tokenmerge_tools.cli.quiet import quiet_libraries
from tokenmerge_tools.generate.like import options_like
from tokenmerge_tools.generate.run import generate as run_generate
from tokenmerge_tools.method_spec import MethodSpec
from tokenmerge_tools.pipelines.options import GenerateOptions
from tokenmerge_tools.pipelines.settings import parse_size


@with_merging_options
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
    model: Model = GenerateOptions.model,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for results. Default: a new folder in outputs/, named after the prompt."),
    ] = None,
    merging: MethodSpec,
    size: Size = None,
    steps: Steps = GenerateOptions.steps,
    seed: Annotated[
        int, picture("Seed of the first picture; each later picture adds 1.", parser=integer)
    ] = GenerateOptions.seed,
    batch: Annotated[int, picture("Pictures per call.", parser=integer)] = GenerateOptions.batch,
    scheduler: Scheduler = None,
    negative_prompt: Annotated[str | None, picture("What not to draw.")] = None,
    guidance: Guidance = None,
    control: Annotated[Path | None, picture("Picture for the ControlNet.")] = None,
    controlnet: Annotated[str | None, picture("Folder or hub id of a ControlNet.")] = None,
    dtype: Dtype = GenerateOptions.dtype,
    device: Device = GenerateOptions.device,
    attention: Attention = GenerateOptions.attention,
    compile: Annotated[
        bool, machine("Use torch.compile. Compiling is part of the untimed warm-up.", "--compile")
    ] = False,
    compare: Annotated[bool, machine("Also run without merging.", "--compare/--no-compare")] = True,
    repeat: Annotated[int, machine("Timed calls per variant.", parser=integer)] = GenerateOptions.repeat,
    record_steps: Annotated[
        bool,
        machine(
            "Print what each merged step of the untimed call did, and draw it as steps.svg.", "--record-steps"
        ),
    ] = False,
) -> None:
    """Generate pictures with and without merging from the same seeds; measure time, memory and closeness.

    This writes the pictures, a comparison picture and run.json. Times are medians of interleaved pipeline
    calls after an untimed warm-up.
    """
    given = dict(locals())  # every option by its name
    del given["context"], given["like"]
    given["size"] = None if size is None else parse_size(size)
    quiet_libraries("tokenmerge generate")
    if like is not None:
        given, notes = options_like(like, given, _named(context))
        for note in notes:
            tables.say(f"note: {note}")
    if given["prompt"] is None:
        raise ConfigError('prompt: say what to draw, such as "a red apple", or give a picture with --like')
    options = GenerateOptions(**given)
    with tables.progress_bars("steps") as on_progress:
        result = run_generate(options, on_progress)
    if result.steps is not None:
        print(result.steps)
    tables.show(tables.result_table(result), *tables.result_notes(result))


def _named(context: typer.Context) -> set[str]:
    """Return the options given on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
