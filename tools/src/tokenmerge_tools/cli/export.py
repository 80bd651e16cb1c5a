"""``tokenmerge export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokenmerge.report import saved
from tokenmerge_tools.cli import tables
from tokenmerge_tools.cli.arguments import Guidance, Size, integer, picture
from tokenmerge_tools.cli.merging import with_merging_options
from tokenmerge_tools.cli.quiet import quiet_libraries
from tokenmerge_tools.export.formats import FORMATS
from tokenmerge_tools.export.record import FILE
from tokenmerge_tools.export.run import ExportOptions
from tokenmerge_tools.export.run import export as run_export
from tokenmerge_tools.method_spec import MethodSpec
from tokenmerge_tools.pipelines.settings import parse_size


@with_merging_options
def export(
    model: Annotated[
        str, typer.Argument(help="Bundled model, diffusers folder, .safetensors checkpoint or hub id.")
    ],
    *,
    to: Annotated[str, typer.Option(help=f"{', '.join(FORMATS)}.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the files, which must be new or empty.")
    ],
    merging: MethodSpec,
    size: Size = None,
    batch: Annotated[int, picture("Pictures per call.", parser=integer)] = ExportOptions.batch,
    guidance: Guidance = None,
) -> None:
    """Export a denoiser that merges tokens, at a fixed size, for programs that run without PyTorch.

    The exported model plans and merges by itself in each call. It is one graph for every step, so it cannot
    reuse steps: with the method auto, which is the default at a ratio of 0.5, only its token merging is
    exported. Settings that follow the denoising steps are refused. A ratio of 0 exports the dense model.
    The result is checked against PyTorch, and export.json in the folder describes it.
    """
    options = ExportOptions(
        model=model,
        to=to,
        out=out,
        merging=merging,
        size=None if size is None else parse_size(size),
        batch=batch,
        guidance=guidance,
    )
    quiet_libraries("tokenmerge export")
    with tables.working("exporting"):
        found = run_export(options)
    merged = found.merging
    rows = merged.rows
    print(f"{out / found.file}: {found.denoiser}, {found.size[0]} × {found.size[1]}, batch {found.batch}")
    if rows:
        tokens, left = (sum(getattr(row, name) for row in rows) for name in ("tokens", "merged_tokens"))
        share = saved(merged.flops_dense, merged.flops_merged)
        print(f"{tokens} tokens → {left} in {len(rows)} blocks, {share} of the operations saved")
    by = " with the same plans" if found.check.plans else ""
    print(
        f"largest difference from PyTorch{by}: {found.check.relative:.1e} of its largest output "
        f"({found.check.engine})"
    )
    print(f"description and inputs: {out / FILE}")
