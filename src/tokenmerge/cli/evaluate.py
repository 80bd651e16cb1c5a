"""``tokenmerge evaluate``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from tokenmerge.cli import tables
from tokenmerge.cli.arguments import Size, integer, machine, number, option, picture
from tokenmerge.cli.quiet import quiet_libraries
from tokenmerge.measure.evaluate.metrics import ALL, METRIC_NAMES
from tokenmerge.measure.evaluate.options import EvaluateOptions
from tokenmerge.measure.evaluate.prompts import IMAGENET_TEMPLATE
from tokenmerge.measure.evaluate.runner import Progress
from tokenmerge.measure.evaluate.runner import evaluate as run_evaluate
from tokenmerge.measure.evaluate.variants import CHOICES
from tokenmerge.measure.pipelines.settings import ATTENTION_CHOICES, DTYPE_CHOICES, SCHEDULER_NAMES
from tokenmerge.measure.pipelines.sizes import parse_size
from tokenmerge.measure.reporting.quality_tables import quality_tables

__all__ = ["evaluate"]


_compared = partial(option, "Compared")
_prompts = partial(option, "Prompts")
_results = partial(option, "Results")


def evaluate(
    model: Annotated[
        str, typer.Option(help="Bundled model, diffusers folder, .safetensors checkpoint or hub id.")
    ] = EvaluateOptions.model,
    prompts: Annotated[
        Path | None,
        _prompts(
            "File: a prompt a line, PartiPrompts' TSV, or ImageNet's classes with WordNet ids. Default: "
            "those that come with a bundled model."
        ),
    ] = None,
    template: Annotated[
        str | None, _prompts(f"Text around each line of the file, such as '{IMAGENET_TEMPLATE}'.")
    ] = None,
    limit: Annotated[int | None, _prompts("Only the first so many.", parser=integer)] = None,
    seeds: Annotated[int, _prompts("Pictures of each prompt.", parser=integer)] = EvaluateOptions.seeds,
    seed: Annotated[
        int, _prompts("Seed of the first of them; the next has the next.", parser=integer)
    ] = EvaluateOptions.seed,
    variant: Annotated[
        list[str] | None,
        _compared(
            f"{', '.join(CHOICES)}; or with any setting of ToMeConfig: toma:ratio=0.6, "
            "tome:proportional,scope=block,schedule.ratio=1.4/0.6. tomesd is the package of that name. "
            "May be repeated."
        ),
    ] = None,
    ratio: Annotated[list[float] | None, _compared("Fraction of tokens removed. May be repeated.")] = None,
    max_downsample: Annotated[
        int | None, _compared("Deepest level that merges. SDXL needs 2.", parser=integer)
    ] = None,
    metric: Annotated[
        list[str] | None,
        _compared(
            f"Beside psnr and ssim: {', '.join(METRIC_NAMES[2:])}, or {ALL}, which is all that works here; "
            "NAME=FOLDER or a hub id takes another network. May be repeated."
        ),
    ] = None,
    reference: Annotated[
        Path | None, _compared("Folder of pictures that fid and kid compare with. Default: those of dense.")
    ] = None,
    size: Size = None,
    steps: Annotated[int, picture("Denoising steps.", parser=integer)] = EvaluateOptions.steps,
    scheduler: Annotated[
        str | None,
        picture(f"{', '.join(SCHEDULER_NAMES)}, or a class of diffusers. Default: the model's own."),
    ] = None,
    guidance: Annotated[
        float | None, picture("Guidance scale. Default: the pipeline's own.", parser=number)
    ] = None,
    out: Annotated[
        Path,
        _results("Records, one JSON line each; the pictures go to the folder of that name.", "--out", "-o"),
    ] = EvaluateOptions.out,
    save_grid: Annotated[
        Path | None, _results("Write a sheet of samples: rows prompts, columns dense and variants.")
    ] = None,
    samples: Annotated[
        int, _results("Prompts on that sheet and in the report.", parser=integer)
    ] = EvaluateOptions.samples,
    batch: Annotated[
        int, machine("Pictures per call; pictures depend on it by rounding alone.", parser=integer)
    ] = EvaluateOptions.batch,
    dtype: Annotated[str, machine(f"{', '.join(DTYPE_CHOICES)}.")] = EvaluateOptions.dtype,
    device: Annotated[str, machine("auto, cpu, cuda, cuda:1 or mps.")] = EvaluateOptions.device,
    attention: Annotated[str, machine(f"{', '.join(ATTENTION_CHOICES)}.")] = EvaluateOptions.attention,
) -> None:
    """Measure what merging costs in quality, on many pictures drawn dense and merged with the same seeds.

    A metric that needs weights from a hub says so before the first picture; one that you name and that cannot
    work here is an error at once. Ctrl-C keeps the finished pictures; the same command continues. Under
    accelerate launch the prompts are split over the processes.
    """
    options = EvaluateOptions(
        model=model,
        prompts=prompts,
        template=template,
        limit=limit,
        seeds=seeds,
        seed=seed,
        variants=tuple(variant or EvaluateOptions.variants),
        ratio=tuple(ratio or EvaluateOptions.ratio),
        max_downsample=max_downsample,
        size=None if size is None else parse_size(size),
        steps=steps,
        scheduler=scheduler,
        guidance=guidance,
        batch=batch,
        dtype=dtype,
        device=device,
        attention=attention,
        metrics=tuple(metric or ()),
        reference=reference,
        samples=samples,
        out=out,
        grid=save_grid,
    )
    quiet_libraries("tokenmerge evaluate")
    with _progress_bar() as on_progress:
        records = run_evaluate(options, on_progress, on_note=lambda note: _say(f"note: {note}"))
    if records is None:  # the first of several processes tells
        return
    (table,) = quality_tables(records)
    tables.show(
        tables.as_rich(table),
        *(f"note: {note}" for note in table.notes),
        *([] if save_grid is None else [f"samples are in {save_grid}"]),
        f"written to {out}; next: tokenmerge report {out.parent}",
    )


@contextlib.contextmanager
def _progress_bar() -> Iterator[Callable[[Progress], None]]:
    """Show how many pictures are drawn, on stderr; yields what moves the bar."""
    columns = (
        TextColumn("drawing"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("pictures"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    bars = Bars(*columns, console=Console(stderr=True))
    task = bars.add_task("drawing", total=None)
    moved = False

    def move(progress: Progress) -> None:
        nonlocal moved
        if not moved:
            bars.start()
        moved = True
        bars.update(task, completed=progress.done, total=progress.total)

    try:
        yield move
    finally:
        if moved:
            bars.stop()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
