"""The options of ``tokenmerge evaluate``, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tokenmerge.config.checks import integer, optional
from tokenmerge.errors import ConfigError
from tokenmerge_tools import demo
from tokenmerge_tools.evaluate.drawn import parse_variants
from tokenmerge_tools.evaluate.metrics import ALL, Wanted, parse_metrics
from tokenmerge_tools.evaluate.prompts import Prompt, built_in_prompts, read_prompts
from tokenmerge_tools.pipelines.loading import DEFAULT_MODEL
from tokenmerge_tools.pipelines.options import GenerateOptions
from tokenmerge_tools.variants.variant import Variant


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """What to draw, with what, and what to measure.

    Fields that are not listed here are as in
    :class:`tokenmerge_tools.pipelines.options.GenerateOptions`.

    Args:
        prompts: a file, see :func:`tokenmerge_tools.evaluate.prompts.read_prompts`. None: the built-in
            prompts of a bundled model.
        template: text around each line of the file, with ``{}`` in its place.
        limit: use only this many prompts from the start, ≥ 1. None: all.
        seeds: pictures per prompt, ≥ 1. Raising it reduces the noise of every metric and takes longer.
        variants: what is compared with dense, such as ``"tome"`` or ``"tome:ratio=0.75,merge_mlp"``.
        ratio: ratios for the variants that do not set their own.
        max_downsample: deepest level that merges, for the same variants. None: the variant's default.
        batch: pictures per call, ≥ 1. Raising it is faster on a GPU and needs more memory. Pictures change
            only by rounding.
        metrics: metrics in addition to PSNR and SSIM; see
            :func:`tokenmerge_tools.evaluate.metrics.parse_metrics`.
        reference: folder of reference pictures for FID and KID. None: the dense pictures.
        frames: length of the videos, ≥ 2, for a pipeline that draws videos. None: the pipeline's default.
        samples: number of prompts that the sheet and the report show, ≥ 0.
        out: results file, ending in ``.jsonl``. The pictures go to a folder of the same name beside it.
        grid: file for the sheet of samples. None: no sheet.

    Raises:
        ConfigError: a value is outside these ranges, or two values contradict each other.
    """

    model: str = DEFAULT_MODEL
    prompts: Path | None = None
    template: str | None = None
    limit: int | None = None
    seeds: int = 1
    seed: int = 0
    variants: tuple[str, ...] = ("auto", "tome", "fewer-steps")
    ratio: tuple[float, ...] = (0.25, 0.5)
    max_downsample: int | None = None
    size: tuple[int, int] | None = None
    frames: int | None = None
    steps: int = GenerateOptions.steps
    scheduler: str | None = None
    guidance: float | None = None
    batch: int = 4
    dtype: str = GenerateOptions.dtype
    device: str = GenerateOptions.device
    attention: str = GenerateOptions.attention
    metrics: tuple[str, ...] = ()
    reference: Path | None = None
    samples: int = 4
    out: Path = Path("outputs/evaluate.jsonl")
    grid: Path | None = None

    def __post_init__(self) -> None:
        self.drawing("a prompt")
        for name, lowest in (("limit", 1), ("seeds", 1), ("samples", 0), ("frames", 2)):
            optional(integer(lowest))(name, getattr(self, name))
        self.specs()
        wanted = {metric.name for metric in self.wanted()}
        if self.reference is not None and not wanted & {"fid", "kid"}:
            raise ConfigError(f"reference: only fid and kid compare with it; add --metric fid, kid or {ALL}")
        if self.prompts is None:
            if self.model not in demo.NAMES:
                raise ConfigError(
                    f"prompts: only bundled models ({', '.join(demo.NAMES)}) have their own; give --prompts "
                    "with a file, one prompt per line"
                )
            if self.template is not None:
                raise ConfigError("template: it is for the lines of a file; give --prompts too")
        if self.out.suffix != ".jsonl":
            raise ConfigError(f"out: expected a file ending in .jsonl, got {self.out}")
        if self.grid is not None and self.grid.suffix not in (".png", ".jpg", ".webp"):
            raise ConfigError(f"save-grid: expected a file ending in .png, .jpg or .webp, got {self.grid}")
        if self.grid is not None and self.samples == 0:
            raise ConfigError("save-grid: samples=0 leaves it empty; raise --samples")

    def drawing(self, prompt: str) -> GenerateOptions:
        """The options of ``tokenmerge generate`` for drawing a prompt."""
        shared = ("model", "size", "steps", "seed", "batch", "scheduler", "guidance", "dtype", "device")
        values = {name: getattr(self, name) for name in (*shared, "attention")}
        return GenerateOptions(prompt=prompt, **values)

    def specs(self) -> list[Variant]:
        """The variants. Fewer steps count as one, however many variants they are compared with."""
        return parse_variants(self.variants, self.ratio, self.max_downsample)

    def wanted(self) -> list[Wanted]:
        """The metrics, including the retrieval of glyphs for the built-in prompts."""
        wanted = parse_metrics(self.metrics)
        if self.prompts is None and "glyphs" not in [metric.name for metric in wanted]:
            wanted.append(Wanted("glyphs", None, by_name=False))
        return wanted

    def read_prompts(self) -> list[Prompt]:
        """The prompts to draw.

        Raises:
            ConfigError: the file is missing, binary or empty.
        """
        found = built_in_prompts() if self.prompts is None else read_prompts(self.prompts, self.template)
        return found[: self.limit]
