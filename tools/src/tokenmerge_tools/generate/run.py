"""Generates images dense and merged from the same seeds, and measures time, memory and closeness."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from tokenmerge.config import ToMeConfig
from tokenmerge.config.origin import DEFAULT
from tokenmerge.errors import ConfigError, MissingExtraError
from tokenmerge.report import Report, RunSteps
from tokenmerge_tools.closeness import psnr, ssim
from tokenmerge_tools.drawing import Drawing, Progress, Studio, as_long_as, prepare
from tokenmerge_tools.failures import is_out_of_memory
from tokenmerge_tools.files import (
    free_folder,
    gone_without_results,
    open_picture,
    slug,
    write_atomically,
    write_json,
)
from tokenmerge_tools.generate.parameters import write_picture
from tokenmerge_tools.machine import environment
from tokenmerge_tools.pipelines.call import load_pipeline_for
from tokenmerge_tools.pipelines.loading import require_diffusers
from tokenmerge_tools.pipelines.meta_model import checked_source
from tokenmerge_tools.pipelines.options import GenerateOptions
from tokenmerge_tools.pipelines.settings import resolve_device, resolve_dtype, scheduler_class_name
from tokenmerge_tools.sheets import as_tensor, comparison
from tokenmerge_tools.timing import Measurement, peak_memory_meaning
from tokenmerge_tools.variants import contexts

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from PIL.Image import Image


@dataclasses.dataclass
class Result:
    """The results of a run so far. Dense comes first among the names of the variants, if it runs.

    ``psnr`` in dB and ``ssim`` compare each merged image with the dense one of the same seed, in 8 bits. They
    are empty without a dense run or without torchmetrics. The PSNR of equal images is infinite. ``config``
    has the settings, and ``summary`` is the text of the patch after the run. ``steps`` is None if no steps
    were recorded.

    ``fewer_steps`` is the number of dense steps that take as long as the merged images, or None if no
    images were drawn with them. ``fewer_seconds`` is the time for each of these images, and
    ``fewer_psnr`` their mean PSNR in dB to the dense ones.
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
    missing: str = ""  # why the closeness was not measured, and what to install
    complete: bool = False
    summary: str = ""
    steps: RunSteps | None = None
    fewer_steps: int | None = None
    fewer_seconds: float = 0.0
    fewer_psnr: float | None = None

    def seconds(self, name: str) -> list[float]:
        """Return the seconds per image of each timed call of one variant, in order."""
        return [one.seconds / self.batch for one in self.measurements if one.variant == name]

    def peak_bytes(self, name: str) -> int | None:
        """Return the peak memory of one variant, or None if it cannot be read."""
        peaks = (one.peak_bytes or 0 for one in self.measurements if one.variant == name)
        return max(peaks, default=0) or None

    def speedup(self, name: str) -> float | None:
        """Return the median time of dense over that of one variant, or None if either was not timed."""
        dense = self.seconds("dense")
        seconds = self.seconds(name)
        return median(dense) / median(seconds) if dense and seconds else None

    @property
    def share_of_work(self) -> float:
        """The time of tokenmerge over that of dense.

        On a CPU, it is the time of the processor, so that other programs do not matter.
        """
        work = {one.variant: one.work_seconds for one in self.measurements}
        return work["tokenmerge"] / work["dense"]

    def write(self) -> None:
        """Write ``run.json``."""
        write_json(self.folder / "run.json", self.to_dict(), is_result=bool(self.measurements))

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``run.json``. An infinite PSNR becomes the string ``"inf"``."""
        variants = {}
        for name in self.names:
            times = None
            seconds = self.seconds(name)
            if seconds:
                times = {
                    "median": median(seconds),
                    "fastest": min(seconds),
                    "slowest": max(seconds),
                    "runs": len(seconds),
                }
            variants[name] = {
                "seconds_per_call": [one.seconds for one in self.measurements if one.variant == name],
                "seconds_per_image": times,
                "speedup": self.speedup(name),
                "peak_memory_bytes": self.peak_bytes(name),
            }
        quality = None
        if self.psnr:
            psnr = [value if math.isfinite(value) else str(value) for value in self.psnr]
            quality = {"psnr_db": psnr, "ssim": list(self.ssim)}
            if self.fewer_psnr is not None:
                fewer = {"steps": self.fewer_steps, "seconds": self.fewer_seconds, "psnr_db": self.fewer_psnr}
                quality["fewer_steps"] = fewer
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
    of which the first makes the images. Results are written as soon as they exist, so that an interrupted
    run keeps them: the dense images before the first merged call, and ``run.json`` after every call.

    ``on_progress`` is called after each step of a timed call, ``on_start`` with the options once the size is
    known, and ``on_comparison`` with the path of the image that compares dense and merged once it exists.
    """
    require_diffusers("tokenmerge generate")
    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, device)
    if options.scheduler is not None:
        scheduler_class_name(options.scheduler)
    control = None
    if options.control is not None:
        control = open_picture(options.control, "control", "give a PNG, JPEG or WebP image")
    # With a ControlNet, the denoiser may stay dense if the ControlNet merges.
    merges = options.merging if options.controlnet is None else None
    source = checked_source(options.model, options.size, merges, draws=True)
    folder = options.out or free_folder(Path("outputs"), slug(options.prompt))
    with gone_without_results(folder):
        pipe = load_pipeline_for(options, source, dtype, device)
        try:
            run = _Generating(pipe, options, control, folder, on_progress, on_comparison)
            on_start(run.options)
            return run.run()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise ConfigError(
                "there is too little memory; lower --size or --batch, or use --dtype fp16"
            ) from error


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
        prepared = prepare(pipe, options, control)
        self.call = prepared.call
        self.options = prepared.options
        width, height = prepared.options.size or (0, 0)
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
        self.metadata: Callable[[], str] = str
        self.variants = ("dense", "tokenmerge") if options.compare else ("tokenmerge",)
        about = (folder, conditions, options.batch, self.variants, prepared.report, prepared.config)
        self.result = Result(*about, notes=list(prepared.report.notes))
        done: Counter[str] = Counter()

        def on_step(name: str, steps_per_call: int) -> None:
            if ": " in name:  # a copy that warms up has such a name
                return
            done[name] += 1
            calls = options.repeat if name in self.variants else 1
            if name == "tokenmerge" and options.record_steps:
                calls += 1
            part = "with tokenmerge" if name == "tokenmerge" else name
            on_progress(Progress(part, done[name], steps_per_call * calls))

        self.studio = Studio(pipe, on_step)

    def run(self) -> Result:
        """Time the calls; the first of each variant makes the images."""
        options = self.options
        merging = self.options.merging
        result = self.result
        result.write()
        method = f"{DEFAULT} {merging.speedup:g}" if merging.needs_model else ""
        speedup = merging.speedup if merging.is_default_method else None
        asked: dict[str, Any] = {"speedup": speedup, "min_psnr": options.min_psnr, "file": merging.tuned_file}
        apply = partial(contexts.tokenmerge, config=result.config, method=method, **asked)
        with self.studio as studio:
            patch = studio.add("tokenmerge", apply)
            self.metadata = patch.metadata
            for name in self.variants:
                studio.warm_up(name, self.call)
            images = {one.variant: one.pictures for one in self._timed(1)}
            # The default method knows all facts only when it runs.
            result.config = patch.config
            result.report = patch.report()
            result.conditions["config"] = result.config.to_dict()
            if options.compare:
                self._compare(images["dense"], images["tokenmerge"])
                result.write()
            for _ in self._timed(options.repeat - 1):
                pass
            result.summary = str(patch)
            if options.record_steps:
                patch.record_steps(True)
                studio.draw("tokenmerge", self.call)
                result.steps = patch.steps
        result.complete = True
        result.write()
        return result

    def _timed(self, repeat: int) -> Iterator[Drawing]:
        """Draw and time interleaved calls, and write the record after each, and the images of the first."""
        for drawing in self.studio.rounds(dict.fromkeys(self.variants, self.call), repeat):
            if not any(earlier.variant == drawing.variant for earlier in self.result.measurements):
                self._write_images(drawing.variant, drawing.pictures, self.options)
            self.result.measurements.append(drawing)
            self.result.write()
            yield drawing

    def _write_images(self, variant: str, images: list[Image], options: GenerateOptions) -> None:
        metadata = self.metadata() if variant == "tokenmerge" else None
        for index, image in enumerate(images):
            about = (options, self.call.seeds[index], metadata)
            path = self.result.folder / f"{variant}-{index:02d}.png"
            write_atomically(path, partial(write_picture, image, *about))

    def _draw_fewer(self, count: int) -> list[Image]:
        """Draw with the dense model, in as many steps as fit into the time of the merged images.

        They need at least as many operations as the merged images. The list is empty if that takes all steps.
        """
        steps = as_long_as(self.options.steps, self.result.share_of_work, self.result.report.speedup)
        if steps is None:
            return []
        began = time.perf_counter()
        images = self.studio.draw("dense", self.call.with_steps(steps), "fewer steps")
        self.result.fewer_steps = steps
        self.result.fewer_seconds = (time.perf_counter() - began) / count
        self._write_images("fewer-steps", images, dataclasses.replace(self.options, steps=steps))
        return images

    def _compare(self, dense: list[Image], merged: list[Image]) -> None:
        """Measure how close the images are, and write them side by side with those of fewer steps."""
        fewer = self._draw_fewer(len(dense))
        captions = [[f"seed {seed}"] for seed in self.call.seeds]
        result = self.result
        try:
            result.psnr, result.ssim = _closeness(merged, dense, captions)
            if fewer:
                of_fewer, _ = _closeness(fewer, dense, captions)
                mean = sum(of_fewer) / len(dense)
                result.fewer_psnr = mean if math.isfinite(mean) else None
        except MissingExtraError as error:
            self.result.missing = str(error)
            self.result.notes.append(str(error))
        mean_psnr = sum(result.psnr) / len(dense) if result.psnr else None
        unchanged = "the unchanged model, {} steps"
        asked = self.options.merging.argument or self.options.merging.title
        first = result.seconds("dense")[0]
        took = result.seconds("tokenmerge")[0]
        titles = [
            (f"dense, {first:.1f} s", unchanged.format(self.options.steps)),
            (f"tokenmerge, {took:.1f} s ({first / took:.1f}x)", asked + _to_dense(mean_psnr)),
        ]
        if result.fewer_seconds:
            took = result.fewer_seconds
            close = unchanged.format(result.fewer_steps) + _to_dense(result.fewer_psnr)
            titles.append((f"fewer steps, {took:.1f} s ({first / took:.1f}x)", close))
        rows = zip(*filter(None, (dense, merged, fewer)), strict=True)
        image = comparison(titles, list(zip(rows, captions if len(dense) > 1 else [""], strict=True)))
        path = self.result.folder / "comparison.png"
        write_atomically(path, image.save)
        self.on_comparison(path)


def _closeness(
    images: list[Image], dense: list[Image], captions: list[list[str]]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the PSNR and the SSIM of each image to the dense one, and add them to its caption."""
    pixels = as_tensor(images)
    reference = as_tensor(dense)
    found_psnr = tuple(psnr(pixels, reference).tolist())
    found_ssim = tuple(ssim(pixels, reference).tolist())
    for texts, psnr_db, similarity in zip(captions, found_psnr, found_ssim, strict=True):
        close = f"PSNR {psnr_db:.1f} dB, SSIM {similarity:.3f}"
        texts.append("identical" if math.isinf(psnr_db) else close)
    return found_psnr, found_ssim


def _to_dense(psnr_db: float | None) -> str:
    close = "" if psnr_db is None else f": {psnr_db:.1f} dB to dense"
    return ": the same as dense" if psnr_db == math.inf else close
