"""Generates pictures dense and merged from the same seeds, and measures time, memory and closeness."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmerge.config import ToMeConfig
from tokenmerge.config.origin import DEFAULT
from tokenmerge.errors import ConfigError, MissingExtraError, reason_of
from tokenmerge.handle import RecordedPlan
from tokenmerge.report import Report, RunSteps
from tokenmerge_tools.closeness import psnr, ssim
from tokenmerge_tools.drawing import Drawing, Progress, Studio, merged_groups, prepare
from tokenmerge_tools.failures import is_of_compiler, is_out_of_memory
from tokenmerge_tools.files import (
    free_folder,
    open_picture,
    prepare_folder,
    slug,
    write_atomically,
    write_json,
)
from tokenmerge_tools.generate.parameters import parameters_of, write_picture
from tokenmerge_tools.machine import environment
from tokenmerge_tools.method_spec import check_compile
from tokenmerge_tools.pipelines.call import load_pipeline_for
from tokenmerge_tools.pipelines.loading import denoising_models, require_diffusers
from tokenmerge_tools.pipelines.meta_model import checked_source
from tokenmerge_tools.pipelines.options import GenerateOptions
from tokenmerge_tools.pipelines.settings import (
    resolve_device,
    resolve_dtype,
    scheduler_class_name,
)
from tokenmerge_tools.sheets import Pair, as_tensor, comparison
from tokenmerge_tools.timing import Measurement, Times, peak_memory_meaning
from tokenmerge_tools.variants import contexts

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from PIL.Image import Image


@dataclasses.dataclass(frozen=True)
class VariantResult:
    """Wall-clock seconds of each timed pipeline call of one variant, in order, and the peak memory."""

    name: str
    seconds: tuple[float, ...]
    peak_bytes: int | None

    def per_image(self, batch: int) -> Times:
        """Return the seconds per picture, which are the seconds per call divided by the batch."""
        return Times.of([seconds / batch for seconds in self.seconds])


@dataclasses.dataclass
class Result:
    """The results of a run so far. Dense comes first among the names of the variants, if it runs.

    ``psnr`` in dB and ``ssim`` are those of each merged picture to the dense one of its seed, in 8 bits;
    empty without a dense run or without torchmetrics. The PSNR of equal pictures is infinite. ``config`` has
    the settings, ``summary`` is the text of the patch after the run, and ``steps`` are None unless recorded.
    """

    folder: Path
    conditions: dict[str, Any]
    batch: int
    names: tuple[str, ...]
    report: Report
    config: ToMeConfig
    measurements: list[Measurement] = dataclasses.field(default_factory=list)
    psnr: tuple[float, ...] = ()
    ssim: tuple[float, ...] = ()
    notes: list[str] = dataclasses.field(default_factory=list)
    complete: bool = False
    summary: str = ""
    steps: RunSteps | None = None

    @property
    def variants(self) -> list[VariantResult]:
        """The measurements of each variant."""
        found = []
        for name in self.names:
            own = [one for one in self.measurements if one.variant == name]
            peak = max((one.peak_bytes for one in own if one.peak_bytes is not None), default=None)
            found.append(VariantResult(name, tuple(one.seconds for one in own), peak))
        return found

    def speedup(self, variant: VariantResult) -> float | None:
        """Return the median time of dense over that of ``variant``; None if either was not timed."""
        dense = self.variants[0]
        if dense.name != "dense" or not dense.seconds or not variant.seconds:
            return None
        return dense.per_image(self.batch).median / variant.per_image(self.batch).median

    def write(self) -> None:
        """Write ``run.json``."""
        write_json(self.folder / "run.json", self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``run.json``. An infinite PSNR becomes the string ``"inf"``."""
        variants = {}
        for one in self.variants:
            per_image = dataclasses.asdict(one.per_image(self.batch)) if one.seconds else None
            variants[one.name] = {
                "seconds_per_call": list(one.seconds),
                "seconds_per_image": per_image,
                "speedup": self.speedup(one),
                "peak_memory_bytes": one.peak_bytes,
            }
        quality = None
        if self.psnr:
            psnr = [value if math.isfinite(value) else str(value) for value in self.psnr]
            quality = {"psnr_db": psnr, "ssim": list(self.ssim)}
        return {
            "complete": self.complete,
            "conditions": self.conditions,
            "variants": variants,
            "quality": quality,
            "report": self.report.to_dict(),
            "notes": self.notes,
            "summary": self.summary,
            **({} if self.steps is None else {"steps": self.steps.to_dicts()}),
        }


def generate(
    options: GenerateOptions,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_start: Callable[[GenerateOptions], None] = lambda options: None,
    on_comparison: Callable[[Path], None] = lambda path: None,
) -> Result:
    """Generate, compare, measure and write everything to a folder.

    First, a few untimed steps of each variant warm up. Then ``repeat`` interleaved calls of each are timed,
    of which the first makes the pictures. Results are written as soon as they exist, so that an interrupted
    run keeps them: the dense pictures before the first merged call, and ``run.json`` after every call.

    ``on_progress`` is called after each step of a timed call, ``on_start`` with the options once the size is
    known, and ``on_comparison`` with the path of the picture that compares dense and merged once it exists.
    """
    require_diffusers("tokenmerge generate")
    if options.compile and not options.merging.needs_model:
        check_compile(options.merging.config())
    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, device)
    if options.scheduler is not None:
        scheduler_class_name(options.scheduler)
    control = None
    if options.control is not None:
        control = open_picture(options.control, "control", "give a PNG, JPEG or WebP picture")
    # With a ControlNet, the denoiser may stay dense if the ControlNet merges.
    merges = options.merging if options.controlnet is None else None
    source = checked_source(options.model, options.size, merges)
    folder = options.out or free_folder(Path("outputs"), slug(options.prompt))
    prepare_folder(folder)

    pipe = load_pipeline_for(options, source, dtype, device)
    with _one_line_errors(options):
        run = _Generating(pipe, options, control, folder, on_progress, on_comparison)
        on_start(run.options)
        return run.run()


class _Generating:
    """One run on a loaded pipeline, and its results so far."""

    def __init__(
        self,
        pipe: DiffusionPipeline,
        options: GenerateOptions,
        control: Image | None,
        folder: Path,
        on_progress: Callable[[Progress], None],
        on_comparison: Callable[[Path], None],
    ) -> None:
        self.on_comparison = on_comparison
        # A compiled model is one graph for all steps, so its settings cannot change over the steps.
        prepared = prepare(pipe, options, control, follows_steps=False if options.compile else None)
        self.call, self.options = prepared.call, prepared.options
        if options.compile:
            check_compile(prepared.config)
        width, height = size = prepared.options.size or (0, 0)
        conditions = {
            "options": options.to_dict(),
            "config": prepared.config.to_dict(),
            "pipeline": type(pipe).__name__,
            "scheduler": type(pipe.scheduler).__name__,
            "width": width,
            "height": height,
            "seeds": list(self.call.seeds),
            "device": str(pipe.device),
            "dtype": str(pipe.dtype).removeprefix("torch."),
            "peak_memory": peak_memory_meaning(pipe.device),
            "environment": environment(),
        }
        self.parameters = parameters_of(options, size)
        self.metadata: Callable[[], str] = str
        self.variants = ("dense", "merged") if options.compare else ("merged",)
        about = (folder, conditions, options.batch, self.variants, prepared.report, prepared.config)
        self.result = Result(*about, notes=list(prepared.report.notes))
        done: Counter[str] = Counter()

        def on_step(name: str, steps_per_call: int) -> None:
            if name not in self.variants:  # it warms up
                return
            done[name] += 1
            calls = options.repeat + (name == "merged" and options.record_steps)
            on_progress(Progress(name, done[name], steps_per_call * calls))

        self.studio = Studio(pipe, on_step)

    def run(self) -> Result:
        """Time the calls; the first of each variant makes the pictures."""
        options, merging, result = self.options, self.options.merging, self.result
        result.write()
        method = f"{DEFAULT} {merging.speedup:g}" if merging.needs_model else ""
        apply = partial(contexts.tokenmerge, config=result.config, method=method)
        if options.min_psnr is not None or (merging.is_default_method and not options.compile):
            apply = partial(contexts.default_method, speedup=merging.speedup, min_psnr=options.min_psnr)
        with self.studio as studio:
            patch = studio.add("merged", apply)
            self.metadata = patch.metadata
            with patch.record() as plans:
                for name in self.variants:
                    studio.warm_up(name, self.call)
            if options.compile:  # only now, so that no graph contains the recording of plans
                for name in self.variants:
                    _compile(studio.pipes[name])
                    studio.warm_up(name, self.call)
            with contextlib.nullcontext(plans) if options.compile else patch.record() as plans:
                pictures = {one.variant: one.pictures for one in self._timed(1)}
            result.config = patch.config  # the default method knows all facts only when it runs
            result.conditions["config"] = result.config.to_dict()
            if options.compare:
                self._compare(pictures["dense"], pictures["merged"], plans)
                result.write()
            for _ in self._timed(options.repeat - 1):
                pass
            result.summary = str(patch)
            if options.record_steps:
                patch.record_steps(True)
                studio.draw("merged", self.call)
                result.steps = patch.steps
        result.complete = True
        result.write()
        return result

    def _timed(self, repeat: int) -> Iterator[Drawing]:
        """Draw and time interleaved calls, and write the record after each, and the pictures of the first."""
        for drawing in self.studio.rounds(dict.fromkeys(self.variants, self.call), repeat):
            if not any(earlier.variant == drawing.variant for earlier in self.result.measurements):
                self._write_pictures(drawing)
            self.result.measurements.append(drawing)
            self.result.write()
            yield drawing

    def _write_pictures(self, drawing: Drawing) -> None:
        """Write one picture per seed."""
        metadata = self.metadata() if drawing.variant == "merged" else None
        for index, picture in enumerate(drawing.pictures):
            parameters = dataclasses.replace(self.parameters, seed=self.call.seeds[index])
            write_atomically(
                self.result.folder / f"{drawing.variant}-{index:02d}.png",
                partial(write_picture, picture, parameters, metadata),
            )

    def _compare(self, dense: list[Image], merged: list[Image], plans: Mapping[str, RecordedPlan]) -> None:
        """Measure how close the pictures are, and write them side by side."""
        captions = [f"seed {seed}" for seed in self.call.seeds]
        try:
            images, reference = as_tensor(merged), as_tensor(dense)
            result = self.result
            result.psnr = tuple(psnr(images, reference).tolist())
            result.ssim = tuple(ssim(images, reference).tolist())
            captions = [
                f"{caption} · identical"
                if math.isinf(psnr_db)
                else f"{caption} · PSNR {psnr_db:.1f} dB · SSIM {similarity:.3f}"
                for caption, psnr_db, similarity in zip(captions, result.psnr, result.ssim, strict=True)
            ]
        except MissingExtraError as error:
            self.result.notes.append(str(error))
        groups = [merged_groups(plans, index, len(merged)) for index in range(len(merged))]
        rows = [
            Pair(dense[index], merged[index], groups[index][0], captions[index])
            for index in range(len(merged))
        ]
        width, height = self.options.size or (0, 0)
        picture = comparison(
            rows,
            dense=f"{width} x {height}, {self.options.steps} steps",
            merged=self.options.merging.title,
            groups=groups[0][1],
        )
        path = self.result.folder / "comparison.png"
        write_atomically(path, picture.save)
        self.on_comparison(path)


def _compile(pipe: DiffusionPipeline) -> None:
    for model in denoising_models(pipe).values():
        model.compile()


@contextlib.contextmanager
def _one_line_errors(options: GenerateOptions) -> Iterator[None]:
    """Turn failures that a user can act on into one-line errors."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise ConfigError(
                "there is too little memory; lower --size or --batch, or use --dtype fp16"
            ) from error
        if options.compile and is_of_compiler(error):
            raise ConfigError(
                f"compile: torch.compile failed ({reason_of(error)}); leave --compile out"
            ) from error
        raise
