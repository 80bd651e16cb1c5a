"""Generates pictures dense and merged from the same seeds, and measures time, memory and closeness."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tokenmerge.api import merge_in_hosts
from tokenmerge.errors import ConfigError, MissingExtraError, reason_of
from tokenmerge.handle import RecordedPlan
from tokenmerge.pictures import Row, as_tensor, comparison
from tokenmerge.report import RunSteps, predict
from tokenmerge_tools.bench.memory import peak_memory_meaning
from tokenmerge_tools.bench.timing import Measurement, interleaved
from tokenmerge_tools.closeness import psnr, ssim
from tokenmerge_tools.failures import is_out_of_memory
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
from tokenmerge_tools.pipelines.call import PipelineCall, latent_scale, load_pipeline_for, own_size
from tokenmerge_tools.pipelines.checks import check_compile, check_merging
from tokenmerge_tools.pipelines.loading import (
    SourceKind,
    find_model,
    require_diffusers,
)
from tokenmerge_tools.pipelines.meta_model import load_sketch
from tokenmerge_tools.pipelines.options import GenerateOptions
from tokenmerge_tools.pipelines.settings import (
    resolve_device,
    resolve_dtype,
    scheduler_class_name,
)
from tokenmerge_tools.pipelines.shared_weights import denoising_models, twin
from tokenmerge_tools.pipelines.sizes import check_size
from tokenmerge_tools.progress import Progress
from tokenmerge_tools.reporting.step_plot import draw_steps

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from PIL.Image import Image


def generate(options: GenerateOptions, on_progress: Callable[[Progress], None] | None = None) -> Result:
    """Generate, compare, measure and write everything to a folder.

    First, one untimed call of each variant warms up and makes the pictures. Then ``repeat`` interleaved calls
    of each are timed. Results are written as soon as they exist, so that an interrupted run keeps them: the
    dense pictures before the first merged call, and ``run.json`` after every timed call.

    Returns:
        The result. ``result.folder`` holds ``dense-00.png`` …, ``merged-00.png`` …, ``comparison.png``,
        ``run.json``, and ``steps.svg`` if steps are recorded.

    Raises:
        TokenMergingError: an option does not fit the model or the machine. Cheap checks run before the
            weights are loaded.
    """
    require_diffusers("tokenmerge generate")
    if options.record_steps and importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("tokenmerge-tools[plots]", needed_by="--record-steps")
    if options.compile and not options.merging.needs_model:
        check_compile(options.merging.config())
    source = find_model(options.model)
    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, device)
    if options.scheduler is not None:
        scheduler_class_name(options.scheduler)
    control = None
    if options.control is not None:
        control = open_picture(options.control, "control", "give a PNG, JPEG or WebP picture")
    if source.kind is not SourceKind.CHECKPOINT:
        sketch = load_sketch(source)
        # With a ControlNet, the denoiser may stay dense if the ControlNet merges.
        if (known_size := options.size or sketch.size) is not None and options.controlnet is None:
            check_merging(sketch, known_size, options.merging)
    folder = options.out or free_folder(Path("outputs"), slug(options.prompt))
    prepare_folder(folder)

    pipe = load_pipeline_for(options, source, dtype, device)
    with _one_line_errors(options):
        return _Run(pipe, options, control, folder, on_progress).run()


class _Run:
    """One run on a loaded pipeline, and its results so far."""

    def __init__(
        self,
        pipe: DiffusionPipeline,
        options: GenerateOptions,
        control: Image | None,
        folder: Path,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self.pipe, self.options, self.folder, self.on_progress = pipe, options, folder, on_progress
        size = options.size or own_size(pipe)
        width, height = check_size(size, latent_scale(pipe))
        self.call = PipelineCall.prepare(pipe, options, size, control)
        # A compiled model is one graph for all steps, so its settings cannot change over the steps.
        self.config = options.merging.config(pipe, follows_steps=False if options.compile else None)
        if options.compile:
            check_compile(self.config)
        samples = options.batch * (2 if self.call.guided else 1)
        in_force = self.config.at_guidance(self.call.guidance)
        self.report = predict(pipe, in_force, height, width, samples, options.steps)
        self.conditions = {
            "options": options.to_dict(),
            "config": self.config.to_dict(),
            "pipeline": type(pipe).__name__,
            "scheduler": type(pipe.scheduler).__name__,
            "width": size[0],
            "height": size[1],
            "seeds": list(self.call.seeds),
            "device": str(pipe.device),
            "dtype": str(pipe.dtype).removeprefix("torch."),
            "peak_memory": peak_memory_meaning(pipe.device),
            "environment": environment(),
        }
        self.parameters = parameters_of(options, size)
        self.metadata = ""
        self.steps_done = {"dense": 0, "merged": 0}
        self.measurements: list[Measurement] = []
        self.quality: Quality | None = None
        self.steps: RunSteps | None = None
        self.notes = list(self.report.notes)

    def run(self) -> Result:
        """Make the pictures, then time the calls."""
        options, merged_pipe = self.options, twin(self.pipe)
        self._write_record(complete=False)
        dense = None
        calls: dict[str, Callable[[], object]] = {}
        if options.compare:
            if options.compile:
                _compile(self.pipe)
            dense = self._pictures("dense", self.pipe)
            calls["dense"] = lambda: self._generate("dense", self.pipe)

        merging = options.merging
        method = merging.method if merging.needs_model and set(merging.changes) <= {"ratio"} else ""
        patch = merge_in_hosts(merged_pipe, self.config, method=method, check_size=False)
        self.metadata = patch.metadata()
        patch.record_steps(options.record_steps)
        with patch.record() as plans:
            merged = self._pictures("merged", merged_pipe)
        if options.record_steps:
            self.steps = patch.steps
            write_text(self.folder / "steps.svg", draw_steps(self.steps))
            patch.record_steps(False)
        if options.compile:  # only now, so that the graph does not contain the recording of plans
            _compile(merged_pipe)
            merged = self._pictures("merged", merged_pipe)
        calls["merged"] = lambda: self._generate("merged", merged_pipe)
        if dense is not None:
            self._compare(dense, merged, plans)

        for measurement in interleaved(calls, options.repeat, self.pipe.device):
            self.measurements.append(measurement)
            self._write_record(complete=False)
        return self._write_record(complete=True)

    def _generate(self, variant: str, pipe: DiffusionPipeline) -> list[Image]:
        calls = self.options.repeat + 1 + (variant == "merged" and self.options.compile)

        def step_done(steps_per_call: int) -> None:
            self.steps_done[variant] += 1
            if self.on_progress is not None:
                self.on_progress(Progress(variant, self.steps_done[variant], steps_per_call * calls))

        return self.call(pipe, step_done)

    def _pictures(self, variant: str, pipe: DiffusionPipeline) -> list[Image]:
        """Make and write one picture per seed."""
        pictures = self._generate(variant, pipe)
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
            Row(dense[index], merged[index], groups[index][0], captions[index])
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
        names = ("dense", "merged") if self.options.compare else ("merged",)
        result = Result(
            folder=self.folder,
            conditions=self.conditions,
            batch=self.options.batch,
            variants=tuple(VariantResult.of(name, self.measurements) for name in names),
            quality=self.quality,
            report=self.report,
            notes=tuple(self.notes),
            complete=complete,
            steps=self.steps,
        )
        write_json(self.folder / "run.json", result.to_dict())
        return result


def merged_groups(plans: Mapping[str, RecordedPlan], index: int, batch: int) -> tuple[NDArray[np.int64], str]:
    """The groups to draw on picture ``index``: those of the last block with the most tokens.

    Returns:
        Labels [h, w], and a text that describes them.
    """
    if not plans:
        return np.zeros((1, 1), dtype=np.int64), "nothing was merged"
    path, recorded = max(reversed(list(plans.items())), key=lambda item: math.prod(item[1].grid))
    labels = recorded.plan.labels()
    # With guidance, the samples with the prompt are the last ones of the batch.
    row = max(0, labels.shape[0] - batch + index)
    of_picture = labels[row, : math.prod(recorded.grid)]  # tokens of reference pictures follow
    grid = of_picture.reshape(recorded.grid[1:]).cpu().numpy()
    where = path.partition(".attentions")[0]
    return grid, f"{grid.size} to {len(np.unique(grid))} tokens in {where}, last plan"


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
        if options.compile and type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise ConfigError(
                f"compile: torch.compile failed ({reason_of(error)}); leave --compile out"
            ) from error
        raise
