"""Holds one model, and draws with it dense and merged, one trial at a time."""

from __future__ import annotations

import dataclasses
import threading
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from tokenmerge.api import apply_token_merging
from tokenmerge.pictures import as_tensor, draw_groups
from tokenmerge.report import predict
from tokenmerge_tools.closeness import psnr
from tokenmerge_tools.generate.run import merged_groups
from tokenmerge_tools.pipelines.call import PipelineCall, latent_scale, load_pipeline_for, own_size
from tokenmerge_tools.pipelines.checks import check_merging
from tokenmerge_tools.pipelines.loading import SourceKind, find_model
from tokenmerge_tools.pipelines.meta_model import load_sketch
from tokenmerge_tools.pipelines.options import GenerateOptions
from tokenmerge_tools.pipelines.settings import resolve_device, resolve_dtype
from tokenmerge_tools.pipelines.shared_weights import twin
from tokenmerge_tools.pipelines.sizes import check_size
from tokenmerge_tools.play.trial import Trial
from tokenmerge_tools.progress import Progress

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from PIL.Image import Image

OnProgress = Callable[[Progress], None]
_WARM_UP_STEPS = 2
_SMALLEST_SIDE = 512  # pixels of the picture with groups, so that their borders are thin


class StoppedError(Exception):
    """A trial was stopped between two denoising steps."""


class Stop:
    """Asks the trials of one visitor to stop. They check it after each denoising step."""

    def __init__(self) -> None:
        self.asked = False

    def check(self) -> None:
        """Raise a StoppedError if a stop was asked for."""
        if self.asked:
            raise StoppedError


@dataclasses.dataclass(frozen=True)
class _Loaded:
    """A pipeline, and its copy for merging on the same weights."""

    model: str
    dense: DiffusionPipeline
    merged: DiffusionPipeline


class Studio:
    """Draws trials. The model stays loaded until a trial asks for another one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: _Loaded | None = None

    def draw(self, options: GenerateOptions, on_progress: OnProgress, stop: Stop) -> Trial:
        """Draw one picture dense and merged.

        A short untimed call of each variant comes first, so that the times are not those of a first call.

        Args:
            options: what to draw. ``batch``, ``compare``, ``compile``, ``repeat`` and ``out`` are not read.
            on_progress: is called after each denoising step.
            stop: ends the trial after the step in which a stop is asked for.

        Raises:
            TokenMergingError: the options do not fit the model or the machine. This is found before
                anything is drawn.
            StoppedError: a stop was asked for.
        """
        with self._lock:
            stop.check()
            on_progress(Progress("loading the model", 0, 1))
            loaded = self._load(options)
            stop.check()
            return _draw(loaded, options, on_progress, stop)

    def _load(self, options: GenerateOptions) -> _Loaded:
        if self._loaded is None or self._loaded.model != options.model:
            source = find_model(options.model)
            device = resolve_device(options.device)
            dtype = resolve_dtype(options.dtype, device)
            if source.kind is not SourceKind.CHECKPOINT:
                sketch = load_sketch(source)
                if (size := options.size or sketch.size) is not None:
                    check_merging(sketch, size, options.merging)
            self._loaded = None  # two models at once may be too many for the memory
            pipe = load_pipeline_for(options, source, dtype, device)
            self._loaded = _Loaded(options.model, pipe, twin(pipe))
        return self._loaded


def _draw(loaded: _Loaded, options: GenerateOptions, on_progress: OnProgress, stop: Stop) -> Trial:
    size = options.size or own_size(loaded.dense)
    width, height = check_size(size, latent_scale(loaded.dense))
    options = dataclasses.replace(options, size=size)
    call = PipelineCall.prepare(loaded.dense, options, size)
    config = options.merging.config(loaded.dense)
    batch = 2 if call.guided else 1
    in_force = config.at_guidance(call.guidance)
    report = predict(loaded.dense, in_force, height, width, batch=batch, steps=options.steps)

    dense, dense_seconds = _timed("dense", call, loaded.dense, on_progress, stop)
    patch = apply_token_merging(loaded.merged, config)
    try:
        with patch.record() as plans, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", UserWarning)
            merged, merged_seconds = _timed("merged", call, loaded.merged, on_progress, stop)
        summary = str(patch)
    finally:
        patch.remove()
    labels, groups_text = merged_groups(plans, 0, 1)
    return Trial(
        options=options,
        dense=dense,
        merged=merged,
        groups=draw_groups(_enlarged(merged), labels),
        groups_text=groups_text,
        dense_seconds=dense_seconds,
        merged_seconds=merged_seconds,
        psnr=psnr(as_tensor([merged]), as_tensor([dense])).item(),
        summary=summary,
        notes=tuple(report.notes),
        warnings=tuple(dict.fromkeys(str(one.message) for one in warned)),
    )


def _enlarged(picture: Image) -> Image:
    factor = -(-_SMALLEST_SIDE // min(picture.size))
    return picture.resize((picture.width * factor, picture.height * factor), resample=0)


def _timed(
    variant: str, call: PipelineCall, pipe: DiffusionPipeline, on_progress: OnProgress, stop: Stop
) -> tuple[Image, float]:
    """Draw one picture after a short call that is not timed."""
    steps = call.arguments["num_inference_steps"]
    short = {**call.arguments, "num_inference_steps": min(steps, _WARM_UP_STEPS)}
    on_progress(Progress(f"{variant}: warming up", 0, steps))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the few steps
        dataclasses.replace(call, arguments=short)(pipe, lambda _: stop.check())
    done = 0

    def step_done(total: int) -> None:
        nonlocal done
        done += 1
        on_progress(Progress(variant, done, total))
        stop.check()

    started = time.perf_counter()
    (picture,) = call(pipe, step_done)
    return picture, time.perf_counter() - started
