"""Draws and measures rounds: dense and some settings with one prompt and seed, one after the other."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tokenmerge.config import ToMeConfig
from tokenmerge.errors import TokenMergingError
from tokenmerge_tools.drawing import Studio
from tokenmerge_tools.evaluate.evaluation import Evaluation
from tokenmerge_tools.evaluate.metrics import Metrics
from tokenmerge_tools.evaluate.picture_store import CONTINUES
from tokenmerge_tools.failures import is_out_of_memory
from tokenmerge_tools.files import write_atomically
from tokenmerge_tools.pipelines.call import PipelineCall, latent_scale, load_pipeline_for
from tokenmerge_tools.pipelines.loading import denoiser_of, free_memory
from tokenmerge_tools.pipelines.settings import check_size
from tokenmerge_tools.tune.candidates import Candidate
from tokenmerge_tools.tune.goal import TuneOptions
from tokenmerge_tools.variants.variant import DENSE, Variant

if TYPE_CHECKING:
    from PIL.Image import Image


# PSNR of a picture that equals dense in every pixel, instead of infinity, so that means stay finite.
_EQUAL = 100.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One picture of one setting, with the value of each metric.

    ``cost`` is the wall-clock time since the previous picture of the round. The first one includes dense.
    """

    name: str
    seconds: float
    dense_seconds: float
    cost: float
    metrics: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Failed:
    """A setting that cannot run on this model or machine."""

    name: str
    reason: str


class Rounds:
    """A loaded pipeline that draws with any setting."""

    def __init__(
        self, options: TuneOptions, evaluation: Evaluation, metrics: Metrics, device: torch.device
    ) -> None:
        self.steps, self.evaluation, self.metrics = options.steps, evaluation, metrics
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
    ) -> Iterator[Outcome | Failed]:
        """Draw dense, then each setting, and yield each result as soon as it is measured.

        ``configs`` has the settings of each candidate; None for one without settings.
        """
        what = self.evaluation.items[item]
        call = self.call.of_pictures([what.prompt.text], [what.seed])
        drawn = {DENSE: Variant(DENSE), **{one.name: one.variant for one in chosen}}
        failed: list[Failed] = []

        def fail(name: str, error: Exception) -> None:
            if name == DENSE:
                raise error
            failed.append(Failed(name, _reason(error)))

        began, calls = time.perf_counter(), {}
        dense_seconds: float = math.nan
        dense: Any = None
        with Studio(self.pipe) as studio:
            for name, one in drawn.items():
                try:
                    if name != DENSE:
                        studio.add(name, partial(one.apply, config=configs[name]))
                    self._warm_up(studio, name, call.with_steps(one.steps(self.steps)))
                    calls[name] = call.with_steps(one.steps(self.steps))
                except Exception as error:
                    fail(name, error)
            for found in studio.rounds(calls, on_error=fail):
                name, (picture,) = found.variant, found.pictures
                path = self.evaluation.store.picture(drawn[name], what)
                write_atomically(path, picture.save, advice=CONTINUES)
                if name == DENSE:
                    dense_seconds, dense = found.seconds, picture
                    continue
                values = self._measure(picture, dense, what.prompt.text)
                now = time.perf_counter()
                yield Outcome(name, found.seconds, dense_seconds, now - began, values)
                began = now
        yield from failed
        free_memory()

    def _warm_up(self, studio: Studio, name: str, call: PipelineCall) -> None:
        if name not in self._warm and (name == DENSE or self.pipe.device.type != "cpu"):
            studio.warm_up(name, call)
        self._warm.add(name)

    def _measure(self, picture: Image, dense: Image, prompt: str) -> dict[str, float]:
        found = {}
        for metric in self.metrics.of_pictures:
            value = float(metric.measure([picture], [dense], [prompt])[0])
            found[metric.name] = min(value, _EQUAL) if metric.name == "psnr" else value
        return {name: value for name, value in found.items() if math.isfinite(value)}


def _reason(error: Exception) -> str:
    """Return why a setting failed. An error that is not due to the setting is raised again."""
    if is_out_of_memory(error):
        return "out of memory"
    if isinstance(error, TokenMergingError):
        return str(error)
    raise error
