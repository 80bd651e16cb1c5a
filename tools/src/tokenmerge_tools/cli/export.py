"""``tokenmerge export``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tokenmerge.report import saved
from tokenmerge_tools.cli import terminal
from tokenmerge_tools.cli.arguments import takes
from tokenmerge_tools.export.run import FILE, ExportOptions
from tokenmerge_tools.export.run import export as run_export
from tokenmerge_tools.pipelines.loading import quiet_libraries


@takes(ExportOptions)
def export(
    model: Annotated[
        str, typer.Argument(help="Bundled model, diffusers folder, .safetensors checkpoint or hub id.")
    ],
    *,
    given: dict[str, Any],
) -> None:
    """Export a denoiser that merges tokens, at a fixed size, for programs that run without PyTorch.

    The exported model merges by itself in each call. It is one graph for every step, so no step can skip
    parts of it: give a ratio and no speed-up. By default half of the tokens merge, and a ratio of 0 exports
    the dense model. Settings that differ from step to step are refused. The result is checked against
    PyTorch, and export.json in the folder describes it.
    """
    options = ExportOptions(model=model, **given)
    quiet_libraries("tokenmerge export")
    with terminal.working("exporting"):
        about = run_export(options)
    merged = about["merging"]
    check = about["check"]
    size = f"{about['width']} × {about['height']}"
    print(f"{options.out / about['file']}: {about['class']}, {size}, batch {about['batch']}")
    if merged["blocks"]:
        share = saved(merged["flops_dense"], merged["flops_merged"])
        tokens = f"{merged['tokens']} tokens → {merged['merged_tokens']} in {merged['blocks']} blocks"
        print(f"{tokens}, {share} of the operations saved")
    difference = f"{check['relative_difference']:.1e} of its largest output ({check['engine']})"
    print(f"largest difference from PyTorch: {difference}")
    print(f"description and inputs: {options.out / FILE}")
