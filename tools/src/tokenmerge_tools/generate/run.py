"""Generates pictures dense and merged from the same seeds, and measures time, memory and closeness."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmerge.errors import ConfigError, MissingExtraError, reason_of
from tokenmerge.handle import RecordedPlan
from tokenmerge.report import RunSteps
from tokenmerge_tools.closeness import psnr, ssim
from tokenmerge_tools.drawing import Progress, Studio, merged_groups, prepare
from tokenmerge_tools.failures import is_of_compiler, is_out_of_memory
from tokenmerge_tools.files import (
    free_folder,
    open_picture,
    prepare_folder,
    slug,
    write_atomically,
    write_json,
    write_text,
)
from tokenmerge_tools.generate.parameters import parameters_of, write_picture
from tokenmerge_tools.generate.result import Quality, Result, VariantResult
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
from tokenmerge_tools.reporting.step_plot import draw_steps
from tokenmerge_tools.sheets import Pair, as_tensor, comparison
from tokenmerge_tools.timing import Measurement, peak_memory_meaning
from tokenmerge_tools.variants import contexts

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from PIL.Image import Image


def generate(
    options: GenerateOptions, on_progress: Callable[[Progress], None] = lambda progress: None
) -> Result:
    """Generate, compare, measure and write everything to a folder.

    First, one untimed call of each variant warms up and makes the pictures. Then ``repeat`` interleaved calls
    of each are timed. Results are written as soon as they exist, so that an interrupted run keeps them: the
    dense pictures before the first merged call, and ``run.json`` after every timed call.
    """
    require_diffusers("tokenmerge generate")
    if options.record_steps and importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("tokenmerge-tools[plots]", needed_by="--record-steps")
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
        return _Generating(pipe, options, control, folder, on_progress).run()


class _Generating:
    """One run on a loaded pipeline, and its results so far."""

    def __init__(
        self,
        pipe: DiffusionPipeline,
        options: GenerateOptions,
        control: Image | None,
        folder: Path,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self.pipe, self.options, self.folder = pipe, options, folder
        # A compiled model is one graph for all steps, so its settings cannot change over the steps.
        prepared = prepare(pipe, options, control, follows_steps=False if options.compile else None)
        self.call, self.config, self.report = prepared.call, prepared.config, prepared.report
        if options.compile:
            check_compile(self.config)
        width, height = size = prepared.options.size or (0, 0)
        self.conditions = {
            "options": options.to_dict(),
            "config": self.config.to_dict(),
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
        self.metadata = ""
        self.measurements: list[Measurement] = []
        self.quality: Quality | None = None
        self.steps: RunSteps | None = None
        self.notes = list(self.report.notes)
        done: Counter[str] = Counter()

        def on_step(name: str, steps_per_call: int) -> None:
            done[name] += 1
            calls = options.repeat + 1 + (name == "merged" and options.compile)
            on_progress(Progress(name, done[name], steps_per_call * calls))

        self.studio = Studio(pipe, on_step)

    def run(self) -> Result:
        """Make the pictures, then time the calls."""
        options, merging = self.options, self.options.merging
        self._write_record(complete=False)
        method = merging.method if merging.needs_model and set(merging.changes) <= {"ratio"} else ""
        apply = partial(contexts.tokenmerge, config=self.config, method=method)
        with self.studio as studio:
            patch = studio.add("merged", apply)
            self.metadata = patch.metadata()
            if options.compare:
                if options.compile:
                    _compile(self.pipe)
                dense = self._pictures("dense")
            patch.record_steps(options.record_steps)
            with patch.record() as plans:
                merged = self._pictures("merged")
            if options.record_steps:
                self.steps = patch.steps
                write_text(self.folder / "steps.svg", draw_steps(self.steps))
                patch.record_steps(False)
            if options.compile:  # only now, so that the graph does not contain the recording of plans
                _compile(studio.pipes["merged"])
                merged = self._pictures("merged")
            if options.compare:
                self._compare(dense, merged, plans)
            for measurement in studio.rounds(dict.fromkeys(self._variants(), self.call), options.repeat):
                self.measurements.append(measurement)
                self._write_record(complete=False)
        return self._write_record(complete=True)

    def _variants(self) -> tuple[str, ...]:
        return ("dense", "merged") if self.options.compare else ("merged",)

    def _pictures(self, variant: str) -> list[Image]:
        """Make and write one picture per seed."""
        pictures = self.studio.draw(variant, self.call)
        for index, picture in enumerate(pictures):
            parameters = dataclasses.replace(self.parameters, seed=self.call.seeds[index])
            write_atomically(
                self.folder / f"{variant}-{index:02d}.png",
                partial(write_picture, picture, parameters, self.metadata if variant == "merged" else None),
            )
        return pictures

    def _compare(self, dense: list[Image], merged: list[Image], plans: Mapping[str, RecordedPlan]) -> None:
        """Measure how close the pictures are, and write them side by side."""
        captions = [f"seed {seed}" for seed in self.call.seeds]
        try:
            images, reference = as_tensor(merged), as_tensor(dense)
            self.quality = Quality(
                psnr=tuple(psnr(images, reference).tolist()), ssim=tuple(ssim(images, reference).tolist())
            )
            captions = [
                f"{caption} · identical"
                if math.isinf(psnr_db)
                else f"{caption} · PSNR {psnr_db:.1f} dB · SSIM {similarity:.3f}"
                for caption, psnr_db, similarity in zip(
                    captions, self.quality.psnr, self.quality.ssim, strict=True
                )
            ]
        except MissingExtraError as error:
            self.notes.append(str(error))
        groups = [merged_groups(plans, index, len(merged)) for index in range(len(merged))]
        rows = [
            Pair(dense[index], merged[index], groups[index][0], captions[index])
            for index in range(len(merged))
        ]
        picture = comparison(
            rows,
            dense=f"{self.conditions['width']} x {self.conditions['height']}, {self.options.steps} steps",
            merged=f"{self.options.merging.method}, ratio {self.config.ratio:g}",
            groups=groups[0][1],
        )
        write_atomically(self.folder / "comparison.png", picture.save)

    def _write_record(self, complete: bool) -> Result:
        result = Result(
            folder=self.folder,
            conditions=self.conditions,
            batch=self.options.batch,
            variants=tuple(VariantResult.of(name, self.measurements) for name in self._variants()),
            quality=self.quality,
            report=self.report,
            notes=tuple(self.notes),
            complete=complete,
            steps=self.steps,
        )
        write_json(self.folder / "run.json", result.to_dict())
        return result


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
