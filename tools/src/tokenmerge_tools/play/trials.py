"""Holds one model, and draws with it with and without tokenmerge, one trial at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from PIL.Image import Image

from tokenmerge.images import draw_groups
from tokenmerge.models.find import find_hosts
from tokenmerge.report import check_merging
from tokenmerge_tools.closeness import psnr
from tokenmerge_tools.drawing import (
    NOTHING_MERGED,
    Drawing,
    Progress,
    Studio,
    as_long_as,
    merged_groups,
    prepare,
)
from tokenmerge_tools.pipelines.call import load_pipeline_for
from tokenmerge_tools.pipelines.meta_model import checked_source
from tokenmerge_tools.pipelines.options import GenerateOptions
from tokenmerge_tools.pipelines.settings import resolve_device, resolve_dtype
from tokenmerge_tools.sheets import as_tensor, enlarge
from tokenmerge_tools.variants import contexts
from tokenmerge_tools.variants.variant import DENSE

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

OnProgress = Callable[[Progress], None]
OURS = "tokenmerge"  # the part of a trial that draws with token merging
_PATIENCE = 10.0  # seconds from the request for a trial to the connection that waits for it
_SMALLEST_SIDE = 512  # pixels of the image with groups, so that their borders are thin


@dataclasses.dataclass(frozen=True, eq=False)
class Fewer:
    """A dense image in fewer steps: its number of steps, its time, and its PSNR to the dense one in dB."""

    image: Image
    steps: int
    seconds: float
    psnr: float


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """One image drawn with and without tokenmerge from the same seed, and the size that was drawn.

    ``merged`` is the image with tokenmerge, and ``groups`` the same with the groups of merged tokens drawn
    over it. The PSNR in dB is infinite for identical images. ``warnings`` has those that were given while
    ``merged`` was drawn. ``fewer`` is dense in as many steps as take the same time, or None if these would be
    all steps.
    """

    options: GenerateOptions
    dense: Image
    merged: Image
    groups: Image
    groups_text: str
    dense_seconds: float
    merged_seconds: float
    psnr: float
    summary: str
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    fewer: Fewer | None = None

    @property
    def speedup(self) -> float:
        """Time of dense over time of merged."""
        return self.dense_seconds / self.merged_seconds

    @property
    def merges(self) -> bool:
        """Whether tokens merged while the image was drawn."""
        return self.groups_text != NOTHING_MERGED

    @property
    def identical(self) -> bool:
        """Whether both images are equal in every pixel."""
        return math.isinf(self.psnr)


class StoppedError(Exception):
    """A trial was stopped between two denoising steps."""


class Stop:
    """Asks a trial to stop. It checks this before it begins and after each denoising step.

    ``present`` says whether the visitor is there. The trial stops when the visitor leaves, or does not come
    within some seconds.
    """

    def __init__(self, present: Callable[[], bool] = lambda: True) -> None:
        self.asked = False
        self._present = present
        self._came = False
        self._began = time.monotonic()

    def check(self) -> None:
        """Raise a StoppedError if a stop was asked for, or the visitor is not there."""
        if self._present():
            self._came = True
        elif self._came or time.monotonic() - self._began > _PATIENCE:
            self.asked = True
        if self.asked:
            raise StoppedError


class Trials:
    """Draws trials. The model stays loaded until a trial asks for another one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: tuple[str, DiffusionPipeline] | None = None

    def draw(self, options: GenerateOptions, on_progress: OnProgress, stop: Stop) -> Trial:
        """Draw one image with and without tokenmerge, and dense in fewer steps.

        A short untimed call of each variant comes first. ``on_progress`` is called after each denoising step.
        Options that do not fit the model or the machine are refused before anything is drawn. A trial that is
        to stop raises a StoppedError.
        """
        with self._lock:
            stop.check()
            on_progress(Progress("loading the model", 0, 1))
            pipe = self._load(options)
            stop.check()
            return _draw(pipe, options, on_progress, stop)

    def _load(self, options: GenerateOptions) -> DiffusionPipeline:
        if self._loaded is None or self._loaded[0] != options.model:
            source = checked_source(options.model, options.size, options.merging, draws=True)
            device = resolve_device(options.device)
            dtype = resolve_dtype(options.dtype, device)
            self._loaded = None  # two models at once may be too many for the memory
            self._loaded = options.model, load_pipeline_for(options, source, dtype, device)
        return self._loaded[1]


def _draw(pipe: DiffusionPipeline, options: GenerateOptions, on_progress: OnProgress, stop: Stop) -> Trial:
    with _warnings() as of_settings:
        prepared = prepare(pipe, options)
    if not options.merging.needs_model:
        check_merging(find_hosts(pipe), prepared.config, prepared.latent)
    done: Counter[str] = Counter()

    def on_step(part: str, total: int) -> None:
        done[part] += 1
        on_progress(Progress(part, done[part], total))
        stop.check()

    def draw(name: str) -> Drawing:
        studio.warm_up(name, prepared.call)
        (found,) = studio.rounds({name: prepared.call})
        return found

    def draw_fewer() -> Fewer | None:
        share = merged.work_seconds / dense.work_seconds
        steps = as_long_as(options.steps, share, patch.report().speedup)
        if steps is None:
            return None
        began = time.perf_counter()
        (image,) = studio.draw(DENSE, prepared.call.with_steps(steps), "dense, fewer steps")
        return Fewer(image, steps, time.perf_counter() - began, closeness(image))

    def closeness(image: Image) -> float:
        return psnr(as_tensor([image]), as_tensor([dense_image])).item()

    stop.check()
    with Studio(pipe, on_step) as studio:
        dense = draw(DENSE)
        (dense_image,) = dense.pictures
        speedup = options.merging.speedup if options.merging.is_default_method else None
        patch = studio.add(OURS, partial(contexts.tokenmerge, config=prepared.config, speedup=speedup))
        with patch.record() as plans, _warnings() as of_drawing:
            merged = draw(OURS)
        summary = str(patch)
        fewer = draw_fewer()
    (merged_image,) = merged.pictures
    labels, groups_text = merged_groups(plans, 0, 1)
    return Trial(
        options=prepared.options,
        dense=dense_image,
        merged=merged_image,
        groups=draw_groups(enlarge(merged_image, -(-_SMALLEST_SIDE // min(merged_image.size))), labels),
        groups_text=groups_text,
        dense_seconds=dense.seconds,
        merged_seconds=merged.seconds,
        psnr=closeness(merged_image),
        summary=summary,
        notes=tuple(prepared.report.notes),
        warnings=tuple(dict.fromkeys(str(one.message) for one in (*of_settings, *of_drawing))),
        fewer=fewer,
    )


@contextlib.contextmanager
def _warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Collect the warnings within the context, even those that were given before."""
    with warnings.catch_warnings(record=True) as kept:
        warnings.simplefilter("always", UserWarning)
        yield kept
