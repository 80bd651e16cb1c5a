"""Write README's table by model: what `auto` at a ratio of 0.5 saves and caches, counted on known architectures.

The models are built without weights, in bfloat16. Counting all of them takes a few minutes.

    python docs/by_model.py
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import diffusers
import torch

from tokenmerge.default_method import settings_for
from tokenmerge.report import predict
from tokenmerge.report.cache_limit import in_words
from tokenmerge_tools.bench.geometry import GEOMETRIES

README = Path(__file__).parent.parent / "README.md"
WEAK_GUIDANCE, STRONG_GUIDANCE = 3.0, 7.5
MARKS = "<!-- by model: written by docs/by_model.py -->", "<!-- end -->"


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        name: of the model.
        geometry: its architecture.
        side: height and width of the latents.
        size: the same in pixels, as text.
        steps: of a generation.
        batch: of a call for one picture.
        measured: a figure of the records, with its condition.
    """

    name: str
    geometry: str
    side: tuple[int, int]
    size: str
    steps: int
    batch: int
    measured: str = "not measured"


ROWS = (
    Row("SD 1.5", "sd15", (64, 64), "512²", 20, 2, "2.35×; 2.02× at guidance 7.5"),
    Row("SD 1.5", "sd15", (96, 96), "768²", 20, 2, "2.58×"),
    Row("SDXL", "sdxl", (128, 128), "1024²", 30, 2),
    Row("SD3 medium", "sd3", (128, 128), "1024²", 28, 2, "3.21× with 13 % of its depth"),
    Row("FLUX.1 dev", "flux", (128, 128), "1024²", 28, 1, "3.20× with 3 % of its depth"),
    Row("FLUX.1 dev", "flux", (128, 128), "1024²", 4, 1),
    Row("Wan 2.1 1.3B", "wan", (60, 104), "832 × 480, 81 frames", 50, 2),
)


def counted(row: Row) -> str:
    """The line of a model."""
    geometry = GEOMETRIES[row.geometry]
    with torch.device("meta"):
        model = getattr(diffusers, geometry.denoiser)(**geometry.config).to(torch.bfloat16).eval()
    configs = [
        settings_for(model, 2.0, *row.side, row.steps, scale, follows_steps=True)
        for scale in (WEAK_GUIDANCE, STRONG_GUIDANCE)
    ]
    reports = [predict(model, config, *row.side, row.batch, row.steps) for config in configs]
    speedups = [report.flops_dense / (report.flops_mean or report.flops_merged) for report in reports]
    weak, strong = (f"{speedup:.2f}×" for speedup in speedups)
    if row.batch == 1:  # without guidance in two passes
        strong = ""
    cells = (row.name, row.size, row.steps, weak, strong, row.measured, in_words(reports[0].kept_bytes))
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Count each row, and write the table."""
    diffusers.utils.logging.set_verbosity_error()
    heads = "model | size | steps | counted | counted, guidance ≥ 5 | measured | cache"
    lines = [f"| {heads} |", "|---|---|---:|---:|---:|---|---:|"]
    for row in ROWS:
        lines.append(counted(row))
        print(lines[-1], flush=True)
    text = README.read_text(encoding="utf-8")
    table = "\n".join((MARKS[0], *lines, MARKS[1]))
    parts = re.compile(re.escape(MARKS[0]) + ".*?" + re.escape(MARKS[1]), re.DOTALL)
    README.write_text(parts.sub(lambda _: table, text, count=1), encoding="utf-8")


if __name__ == "__main__":
    main()
