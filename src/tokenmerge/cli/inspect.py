"""``tokenmerge inspect``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tokenmerge.cli import tables
from tokenmerge.cli.arguments import AsJson, Size, integer, picture
from tokenmerge.cli.merging import with_merging_options
from tokenmerge.cli.quiet import quiet_libraries
from tokenmerge.errors import ConfigError
from tokenmerge.measure.method_spec import MethodSpec
from tokenmerge.measure.pipelines.loading import DEFAULT_MODEL, find_model, load_sketch
from tokenmerge.measure.pipelines.sizes import check_size, parse_size
from tokenmerge.report import predict


@with_merging_options
def inspect(
    model: Annotated[str, typer.Argument(help="Bundled model, diffusers folder or hub id.")] = DEFAULT_MODEL,
    *,
    size: Size = None,
    batch: Annotated[int, picture("Samples per step; guidance needs two per picture.", parser=integer)] = 2,
    steps: Annotated[
        int | None,
        picture("Denoising steps, to report the mean operations over them.", parser=integer),
    ] = None,
    merging: MethodSpec,
    as_json: AsJson = False,
) -> None:
    """Show what merging would do to each block of a model. This reads only its configs, no weights."""
    wanted = None if size is None else parse_size(size)
    quiet_libraries("tokenmerge inspect")
    sketch = load_sketch(find_model(model))
    pixels = wanted or sketch.size
    if pixels is None:
        raise ConfigError("size: this model has no default size; give --size")
    width, height = check_size(pixels, sketch.scale)
    config = merging.config(sketch.denoiser, follows_steps=True)
    report = predict(sketch.denoiser, config, height, width, batch, steps)
    if as_json:
        settings = {"method": merging.method, "merging": config.to_dict()}
        print(json.dumps({**settings, **report.to_dict()}, indent=2))
    else:
        tables.show(tables.report_table(report, pixels), *(f"note: {note}" for note in report.notes))
