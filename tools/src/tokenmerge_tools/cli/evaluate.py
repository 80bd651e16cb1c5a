"""``tokenmerge evaluate``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

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
    option,
    picture,
)
from tokenmerge_tools.cli.merging import warn_of_differences
from tokenmerge_tools.cli.quiet import quiet_libraries
from tokenmerge_tools.evaluate.drawn import CHOICES
from tokenmerge_tools.evaluate.evaluation import EvaluateOptions
from tokenmerge_tools.evaluate.metrics import ALL, METRIC_NAMES
from tokenmerge_tools.evaluate.prompts import IMAGENET_TEMPLATE
from tokenmerge_tools.evaluate.runner import evaluate as run_evaluate
from tokenmerge_tools.pipelines.settings import parse_size
from tokenmerge_tools.reporting.quality_tables import quality_tables
from tokenmerge_tools.settings_file import variant_of_file

_compared = partial(option, "Compared")
_prompts = partial(option, "Prompts")
_results = partial(option, "Results")


def evaluate(
    model: Model = EvaluateOptions.model,
    prompts: Annotated[
        Path | None,
        _prompts(
            "File with one prompt per line, PartiPrompts' TSV, or ImageNet's classes with WordNet ids. "
            "Default: the prompts of the bundled model."
        ),
    ] = None,
    template: Annotated[
        str | None, _prompts(f"Text around each line of the file, such as '{IMAGENET_TEMPLATE}'.")
    ] = None,
    limit: Annotated[int | None, _prompts("Use only the first N prompts.", parser=integer)] = None,
    seeds: Annotated[int, _prompts("Pictures per prompt.", parser=integer)] = EvaluateOptions.seeds,
    seed: Annotated[
        int, _prompts("Seed of the first picture of each prompt; each later one adds 1.", parser=integer)
    ] = EvaluateOptions.seed,
    variant: Annotated[
        list[str] | None,
        _compared(
            f"{', '.join(CHOICES)}; or one of them with settings of ToMeConfig, such as toma:ratio=0.6 or "
            "tome:proportional,scope=block,schedule.ratio=1.4/0.6. tomesd is the package of that name. "
            f"May be repeated. Default: {', '.join(EvaluateOptions.variants)}."
        ),
    ] = None,
    settings: Annotated[
        list[Path] | None,
        _compared("File of settings, such as that of tokenmerge tune, as another variant. May be repeated."),
    ] = None,
    ratio: Annotated[
        list[float] | None,
        _compared(
            "Fraction of tokens removed. May be repeated. Default: "
            f"{' and '.join(map(str, EvaluateOptions.ratio))}."
        ),
    ] = None,
    max_downsample: Annotated[
        int | None, _compared("Deepest level that merges. Default: the variant's own.", parser=integer)
    ] = None,
    metric: Annotated[
        list[str] | None,
        _compared(
            f"In addition to psnr and ssim: {', '.join(METRIC_NAMES[2:])}, or {ALL} for every metric that "
            "works here. NAME=NETWORK uses the network in a folder or with a hub id. May be repeated."
        ),
    ] = None,
    reference: Annotated[
        Path | None,
        _compared("Folder of pictures that fid and kid compare with. Default: the dense pictures."),
    ] = None,
    size: Size = None,
    frames: Annotated[
        int | None,
        picture("Frames of a video, for a model that draws videos. Default: the pipeline's.", parser=integer),
    ] = None,
    steps: Steps = EvaluateOptions.steps,
    scheduler: Scheduler = None,
    guidance: Guidance = None,
    out: Annotated[
        Path,
        _results(
            "Results file, one JSON line per record. Pictures go to a folder of the same name.", "--out", "-o"
        ),
    ] = EvaluateOptions.out,
    save_grid: Annotated[
        Path | None, _results("Write a sheet of samples: one row per prompt, one column per variant.")
    ] = None,
    samples: Annotated[
        int, _results("How many prompts the sheet and the report show.", parser=integer)
    ] = EvaluateOptions.samples,
    batch: Annotated[
        int, machine("Pictures per call. It changes the pictures only by rounding.", parser=integer)
    ] = EvaluateOptions.batch,
    dtype: Dtype = EvaluateOptions.dtype,
    device: Device = EvaluateOptions.device,
    attention: Attention = EvaluateOptions.attention,
) -> None:
    """Measure closeness to dense and speed-up on many pictures, drawn dense and merged from the same seeds.

    Each picture is timed, so that tokenmerge report can draw the price curve from this one run. The variant
    fewer-steps is a dense run with as many steps as fit into the time of each other variant, as counted or as
    recorded by tokenmerge bench.

    All metrics are loaded before the first picture: you see which weights are downloaded, and a named metric
    that cannot work here raises an error. After Ctrl-C, finished pictures are kept; run the same command
    again to continue. For videos, picture metrics are means over the frames, and the motion is compared with
    dense. Under accelerate launch, the prompts are split over the processes.
    """
    given = dict(locals())  # every option by its name
    del given["variant"], given["metric"], given["save_grid"], given["settings"]
    files = [variant_of_file(file) for file in settings or ()]
    for file in settings or ():
        warn_of_differences(file, model, size, steps)
    options = EvaluateOptions(
        **{
            **given,
            "variants": tuple([*(variant or ()), *files] or EvaluateOptions.variants),
            "ratio": tuple(ratio or EvaluateOptions.ratio),
            "size": None if size is None else parse_size(size),
            "metrics": tuple(metric or ()),
            "grid": save_grid,
        }
    )
    quiet_libraries("tokenmerge evaluate")
    with tables.progress_bars("pictures") as on_progress:
        records = run_evaluate(options, on_progress, on_note=lambda note: tables.say(f"note: {note}"))
    if records is None:  # only the first of several processes prints
        return
    (table,) = quality_tables(records)
    tables.show(
        tables.as_rich(table),
        *(f"note: {note}" for note in table.notes),
        *([] if save_grid is None else [f"samples are in {save_grid}"]),
        f"written to {out}; next: tokenmerge report {out.parent}",
    )
