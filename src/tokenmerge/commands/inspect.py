"""``tokenmerge inspect``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tokenmerge.commands import tables
from tokenmerge.commands.arguments import (
    AsJson,
    MaxDownsample,
    MergeAttn,
    MergeCrossattn,
    MergeMlp,
    Rand,
    Ratio,
    Size,
    StrideX,
    StrideY,
    integer,
    picture,
)
from tokenmerge.commands.quiet import quiet_libraries
from tokenmerge.config import ToMeConfig
from tokenmerge.errors import ConfigError
from tokenmerge.loading import DEFAULT_MODEL, find_model, load_sketch
from tokenmerge.report import predict
from tokenmerge.sizes import check_size, parse_size

__all__ = ["inspect"]


def inspect(
    model: Annotated[str, typer.Argument(help="Bundled model, diffusers folder or hub id.")] = DEFAULT_MODEL,
    size: Size = None,
    batch: Annotated[
        int, picture("Samples per step; guidance makes two of each picture.", parser=integer)
    ] = 2,
    ratio: Ratio = ToMeConfig.ratio,
    max_downsample: MaxDownsample = ToMeConfig.max_downsample,
    sx: StrideX = ToMeConfig.sx,
    sy: StrideY = ToMeConfig.sy,
    rand: Rand = ToMeConfig.use_rand,
    merge_attn: MergeAttn = ToMeConfig.merge_attn,
    merge_crossattn: MergeCrossattn = ToMeConfig.merge_crossattn,
    merge_mlp: MergeMlp = ToMeConfig.merge_mlp,
    as_json: AsJson = False,
) -> None:
    """Show what merging would do to each block of a model; reads its configs, not its weights."""
    config = ToMeConfig(
        ratio=ratio,
        max_downsample=max_downsample,
        sx=sx,
        sy=sy,
        use_rand=rand,
        merge_attn=merge_attn,
        merge_crossattn=merge_crossattn,
        merge_mlp=merge_mlp,
    )
    wanted = None if size is None else parse_size(size)
    quiet_libraries("tokenmerge inspect")
    sketch = load_sketch(find_model(model))
    pixels = wanted or sketch.size
    if pixels is None:
        raise ConfigError("size: this model does not say what size it was made for; give --size")
    width, height = check_size(pixels, sketch.scale)
    report = predict(sketch.denoiser, config, height, width, batch)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        tables.show(tables.report_table(report, pixels), *(f"note: {note}" for note in report.notes))
