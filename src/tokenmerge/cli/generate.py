"""``tokenmerge generate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokenmerge.cli import tables
from tokenmerge.cli.arguments import Size, integer, machine, number, picture
from tokenmerge.cli.merging import with_merging_options
from tokenmerge.cli.quiet import quiet_libraries
from tokenmerge.measure.generate.options import GenerateOptions
from tokenmerge.measure.generate.run import generate as run_generate
from tokenmerge.measure.method_spec import Merging
from tokenmerge.measure.pipelines.settings import ATTENTION_CHOICES, DTYPE_CHOICES, SCHEDULER_NAMES
from tokenmerge.measure.pipelines.sizes import parse_size

__all__ = ["generate"]

_SCHEDULER_HELP = f"{', '.join(SCHEDULER_NAMES)}, or a class of diffusers. Default: the model's own."


@with_merging_options
def generate(
    prompt: Annotated[str, typer.Argument(help="What to draw.")],
    *,
    model: Annotated[
        str, typer.Option(help="Bundled model, diffusers folder, .safetensors checkpoint or hub id.")
    ] = GenerateOptions.model,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for results. Default: a new one in outputs/, named by the prompt."),
    ] = None,
    merging: Merging,
    size: Size = None,
    steps: Annotated[int, picture("Denoising steps.", parser=integer)] = GenerateOptions.steps,
    seed: Annotated[
        int, picture("Seed of the first picture; the next has the next.", parser=integer)
    ] = GenerateOptions.seed,
    batch: Annotated[int, picture("Pictures per call.", parser=integer)] = GenerateOptions.batch,
    scheduler: Annotated[str | None, picture(_SCHEDULER_HELP)] = None,
    negative_prompt: Annotated[str | None, picture("What not to draw.")] = None,
    guidance: Annotated[
        float | None,
        picture("Guidance scale. Default: the pipeline's own.", parser=number),
    ] = None,
    control: Annotated[Path | None, picture("Picture for the ControlNet.")] = None,
    controlnet: Annotated[str | None, picture("Folder or hub id of a ControlNet.")] = None,
    dtype: Annotated[str, machine(f"{', '.join(DTYPE_CHOICES)}.")] = GenerateOptions.dtype,
    device: Annotated[str, machine("auto, cpu, cuda, cuda:1 or mps.")] = GenerateOptions.device,
    attention: Annotated[str, machine(f"{', '.join(ATTENTION_CHOICES)}.")] = GenerateOptions.attention,
    compile: Annotated[bool, machine("Use torch.compile, in the untimed warm-up.", "--compile")] = False,
    compare: Annotated[bool, machine("Run without merging too.", "--compare/--no-compare")] = True,
    repeat: Annotated[int, machine("Timed calls per variant.", parser=integer)] = GenerateOptions.repeat,
) -> None:
    """Generate with and without merging from the same seed: pictures, time, memory, closeness.

    Writes the pictures, a comparison picture and run.json. Times are medians of whole pipeline calls that
    take turns, after an untimed warm-up.
    """
    options = GenerateOptions(
        prompt=prompt,
        model=model,
        merging=merging,
        size=None if size is None else parse_size(size),
        steps=steps,
        seed=seed,
        batch=batch,
        scheduler=scheduler,
        negative_prompt=negative_prompt,
        guidance=guidance,
        dtype=dtype,
        device=device,
        compile=compile,
        attention=attention,
        control=control,
        controlnet=controlnet,
        out=out,
        compare=compare,
        repeat=repeat,
    )
    quiet_libraries("tokenmerge generate")
    with tables.progress_bars() as on_progress:
        result = run_generate(options, on_progress)
    tables.show(tables.result_table(result), *tables.result_notes(result))
