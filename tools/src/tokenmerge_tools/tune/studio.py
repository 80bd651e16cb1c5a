"""Draws and times rounds: dense and some settings with one prompt and seed, one after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from tokenmerge.config import ToMeConfig
from tokenmerge.errors import TokenMergingError
from tokenmerge_tools.bench.prepare import free_memory
from tokenmerge_tools.bench.timing import interleaved
from tokenmerge_tools.evaluate.draw import CONTINUES, applied
from tokenmerge_tools.evaluate.drawn import Drawn
from tokenmerge_tools.evaluate.evaluation import Evaluation
from tokenmerge_tools.evaluate.metrics import Metrics
from tokenmerge_tools.evaluate.prompts import Item
from tokenmerge_tools.failures import is_out_of_memory
from tokenmerge_tools.files import write_atomically
from tokenmerge_tools.pipelines.call import PipelineCall, latent_scale, load_pipeline_for
from tokenmerge_tools.pipelines.loading import denoiser_of
from tokenmerge_tools.pipelines.sizes import check_size
from tokenmerge_tools.tune.candidates import Candidate
from tokenmerge_tools.tune.options import TuneOptions
from tokenmerge_tools.variants.variant import DENSE, Variant

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from PIL.Image import Image


# PSNR of a picture that equals dense in every pixel, instead of infinity, so that means stay finite.
_EQUAL = 100.0
_WARM_UP_STEPS = 2


@dataclasses.dataclass(frozen=True)
class Drawing:
    """One picture of one setting.

    Args:
        name: name of the setting.
        seconds: time of the call.
        dense_seconds: time of the dense call of the round.
        cost: wall-clock seconds since the previous picture of the round. The first one includes dense.
        metrics: value of each metric.
    """

    name: str
    seconds: float
    dense_seconds: float
    cost: float
    metrics: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Failed:
    """A setting that cannot run on this model or machine.

    Args:
        name: name of the setting.
        reason: why.
    """

    name: str
    reason: str


class Studio:
    """A loaded pipeline that draws with any setting.

    Args:
        options: what to find settings for.
        evaluation: the model, the size, the items, and where the pictures go.
        metrics: the metrics of each picture.
        device: the device of the pipeline.
    """

    def __init__(
        self, options: TuneOptions, evaluation: Evaluation, metrics: Metrics, device: torch.device
    ) -> None:
        self.steps, self.evaluation, self.metrics, self.device = options.steps, evaluation, metrics, device
        drawing = options.evaluation().drawing(evaluation.prompts[0].text)
        self.pipe = load_pipeline_for(drawing, evaluation.source, evaluation.dtype, device)
        width, height = check_size(evaluation.size, latent_scale(self.pipe))
        self.latent = height, width
        self.call = PipelineCall.prepare(self.pipe, drawing, evaluation.size)
        self.metrics.to(device)
        self._warm: set[str] = set()

    @property
    def denoiser(self) -> torch.nn.Module:
        """The denoiser of the dense pipeline."""
        model: torch.nn.Module = denoiser_of(self.pipe)
        return model

    def draw(
        self, item: int, chosen: Sequence[Candidate], configs: Mapping[str, ToMeConfig | None]
    ) -> Iterator[Drawing | Failed]:
        """Draw dense, then each setting, and yield each result as soon as it is measured.

        Args:
            item: number of the item.
            chosen: the settings.
            configs: settings of each candidate; None for one without settings.
        """
        what = self.evaluation.items[item]
        dense = Drawn(Variant(DENSE), self.steps)
        pictures: dict[str, Image] = {}
        began = time.perf_counter()
        with contextlib.ExitStack() as in_force:
            calls: dict[str, Callable[[], object]] = {
                DENSE: self._call(self.pipe, what, dense, pictures, DENSE)
            }
            for one in chosen:
                try:
                    pipe = applied(self.pipe, one.drawn.spec, configs[one.name], in_force)
                    calls[one.name] = self._call(pipe, what, one.drawn, pictures, one.name)
                except Exception as error:
                    yield Failed(one.name, _reason(error))
            dense_seconds = math.nan
            failures: dict[str, str] = {}
            guarded = {name: partial(_attempt, name, call, failures) for name, call in calls.items()}
            drawn_by = {one.name: one.drawn for one in chosen} | {DENSE: dense}
            for measured in interleaved(guarded, 1, self.device):
                name = measured.variant
                if name in failures:
                    yield Failed(name, failures[name])
                    continue
                path = self.evaluation.store.picture(drawn_by[name], what)
                write_atomically(path, pictures[name].save, advice=CONTINUES)
                if name == DENSE:
                    dense_seconds = measured.seconds
                    continue
                found = self._measure(pictures[name], pictures[DENSE], what.prompt.text)
                now = time.perf_counter()
                yield Drawing(name, measured.seconds, dense_seconds, now - began, found)
                began = now
        free_memory()

    def _call(
        self, pipe: DiffusionPipeline, item: Item, drawn: Drawn, pictures: dict[str, Image], name: str
    ) -> Callable[[], object]:
        of_item = self.call.of_pictures([item.prompt.text], [item.seed])

        def draw(steps: int) -> list[Image]:
            return of_item.with_steps(steps)(pipe, lambda steps: None)

        if name not in self._warm:  # the first call loads and chooses kernels
            self._warm.add(name)
            if name == DENSE or self.device.type != "cpu":
                draw(min(_WARM_UP_STEPS, drawn.steps))

        def timed() -> None:
            (pictures[name],) = draw(drawn.steps)

        return timed

    def _measure(self, picture: Image, dense: Image, prompt: str) -> dict[str, float]:
        found = {}
        for metric in self.metrics.of_pictures:
            value = float(metric.measure([picture], [dense], [prompt])[0])
            found[metric.name] = min(value, _EQUAL) if metric.name == "psnr" else value
        return {name: value for name, value in found.items() if math.isfinite(value)}


def _attempt(name: str, call: Callable[[], object], failures: dict[str, str]) -> None:
    try:
        call()
    except Exception as error:
        if name == DENSE:
            raise
        failures[name] = _reason(error)


def _reason(error: Exception) -> str:
    """The reason why a setting failed. An error that is not due to the setting is raised again."""
    if is_out_of_memory(error):
        return "out of memory"
    if isinstance(error, TokenMergingError):
        return str(error)
    raise error
