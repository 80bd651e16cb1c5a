"""``tokenmerge inspect``."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, get_args

import typer

from tokenmerge.default_method import default_steps
from tokenmerge.errors import ConfigError
from tokenmerge.report import predict
from tokenmerge_tools.cli import terminal
from tokenmerge_tools.cli.arguments import AsJson, takes
from tokenmerge_tools.method_spec import MethodSpec
from tokenmerge_tools.pipelines.loading import DEFAULT_MODEL, find_model, quiet_libraries
from tokenmerge_tools.pipelines.meta_model import load_sketch
from tokenmerge_tools.pipelines.options import Guidance, Size, image_option
from tokenmerge_tools.pipelines.settings import check_size, parse_size


@takes()
def inspect(
    model: Annotated[str, typer.Argument(help="Bundled model, diffusers folder or hub id.")] = DEFAULT_MODEL,
    *,
    size: Annotated[str | None, get_args(Size)[1]] = None,
    batch: Annotated[
        int, image_option("Samples per step; guidance needs two per image.", parser="integer")
    ] = 2,
    steps: Annotated[int | None, image_option("Steps. Default: the pipeline's.", parser="integer")] = None,
    guidance: Guidance = None,
    reference: Annotated[
        list[str] | None,
        image_option("Size of a reference image, for models that edit images. Repeat it for several."),
    ] = None,
    merging: MethodSpec,
    as_json: AsJson = False,
) -> None:
    """Count what merging would save in each block of a model, and over all steps.

    Only the configs of the model are read, and no weights. Nothing is drawn.
    """
    wanted = None if size is None else parse_size(size)
    quiet_libraries("tokenmerge inspect")
    with terminal.working("reading the configs"):
        found = load_sketch(find_model(model))
        steps = default_steps(found.pipeline) if steps is None else steps
    pixels = wanted or found.size
    if pixels is None:
        raise ConfigError("size: this model has no default size; give --size")
    width, height = check_size(pixels, found.scale)
    references = [check_size(parse_size(text), found.scale)[::-1] for text in reference or ()]
    with terminal.working("counting operations"):
        config = merging.config(
            found.pipeline, height=height, width=width, steps=steps, guidance=guidance, follows_steps=True
        )
        report = predict(found.denoiser, config, height, width, batch, steps, references)
        report = dataclasses.replace(report, scale=found.scale)
    if as_json:
        settings = {"method": merging.method, "merging": config.to_dict()}
        print(json.dumps({**settings, **report.to_dict()}, indent=2))
    else:
        print(report)
