"""Draws for a search: final latents, and rounds of timed images beside dense.

A look is one image of one plan, drawn and timed in a round with dense.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any

import torch

from tokenmerge.config import ToMeConfig
from tokenmerge.errors import ConfigError, TokenMergingError, why
from tokenmerge_tools.closeness import snr
from tokenmerge_tools.drawing import Drawing, Studio
from tokenmerge_tools.evaluate.evaluation import Evaluation
from tokenmerge_tools.evaluate.metrics import Metrics
from tokenmerge_tools.evaluate.picture_store import CONTINUES
from tokenmerge_tools.failures import is_out_of_memory
from tokenmerge_tools.files import write_atomically
from tokenmerge_tools.pipelines.call import PipelineCall, latent_scale, load_pipeline_for
from tokenmerge_tools.pipelines.loading import free_memory
from tokenmerge_tools.pipelines.settings import check_size
from tokenmerge_tools.records.kinds import LOWER_IS_CLOSER, TuneRecord
from tokenmerge_tools.tune.options import TuneOptions
from tokenmerge_tools.variants.contexts import tokenmerge
from tokenmerge_tools.variants.variant import DENSE, Variant

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclasses.dataclass(frozen=True)
class Look:
    """One image: number of its prompt and seed, times, and the value of the metric.

    ``cost`` is the wall-clock time since the previous look of the round. The first one includes dense.
    """

    name: str
    item: int
    seconds: float
    dense_seconds: float
    value: float
    cost: float = 0.0


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What some looks say of one plan: the median speed-up t_dense / t, and the mean value of the metric.

    ``error`` is the standard error of the mean; it is infinite for one look.
    """

    looks: int
    speedup: float
    value: float
    error: float


def estimates(looks: Iterable[Look]) -> dict[str, Estimate]:
    """Summarise the looks of each plan."""
    by_name: dict[str, list[Look]] = {}
    for look in looks:
        by_name.setdefault(look.name, []).append(look)
    found = {}
    for name, own in by_name.items():
        speedup = median(look.dense_seconds / look.seconds for look in own)
        mean, error = mean_and_error([look.value for look in own])
        found[name] = Estimate(len(own), speedup, mean, error)
    return found


def gain(looks: Iterable[Look], best: str, rule: str, metric: str) -> tuple[float, float] | None:
    """Return how much closer a plan is than another on their common prompts, and the standard error.

    The result is None if they have no prompt in common. A positive number is closer, for each metric.
    """
    values: dict[str, dict[int, float]] = {best: {}, rule: {}}
    for look in looks:
        if look.name in values:
            values[look.name][look.item] = look.value
    sign = -1 if metric in LOWER_IS_CLOSER else 1
    common = values[best].keys() & values[rule]
    return mean_and_error([sign * (values[best][i] - values[rule][i]) for i in common]) if common else None


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of at least one number and its standard error, infinite for one.

    >>> mean_and_error([1.0]), mean_and_error([1.0, 3.0])
    ((1.0, inf), (2.0, 1.0))
    """
    mean = fmean(values)
    if len(values) == 1:
        return mean, math.inf
    return mean, stdev(values) / math.sqrt(len(values))


def look_of(record: TuneRecord, metric: str) -> Look:
    """Return the look in a record."""
    values = record.values
    if metric not in values["metrics"]:
        raise ConfigError(f"{metric}: the record of {record.name} has no such metric; remove that line")
    seconds, dense_seconds, cost = (float(values[name]) for name in ("seconds", "dense_seconds", "cost"))
    return Look(record.name, record.item, seconds, dense_seconds, float(values["metrics"][metric]), cost)


# PSNR of an image that equals dense in every pixel, instead of infinity, so that means stay finite.
_EQUAL = 100.0


class CannotRunError(TokenMergingError):
    """A plan cannot run on this model or machine. The message is the reason."""


class Rounds:
    """A loaded pipeline that draws with any setting."""

    def __init__(
        self, options: TuneOptions, evaluation: Evaluation, metrics: Metrics, device: torch.device
    ) -> None:
        self.steps = options.steps
        self.evaluation = evaluation
        self.metrics = metrics
        drawing = options.evaluation().drawing(evaluation.prompts[0])
        self.pipe = load_pipeline_for(drawing, evaluation.source, evaluation.dtype, device)
        width, height = check_size(evaluation.size, latent_scale(self.pipe))
        self.latent = height, width
        self.call = PipelineCall.prepare(self.pipe, drawing, evaluation.size)
        self.metrics.to(device)
        self._warm: set[str] = set()
        self._dense: dict[int, Any] = {}

    def dense(self, item: int) -> Any:
        """Return the final latents of the dense image of one prompt and seed, kept after the first time."""
        if item not in self._dense:
            self._dense[item] = self._latents(item, None)
        return self._dense[item]

    def snr(self, item: int, config: ToMeConfig) -> float:
        """Return how close the final latents are to the dense ones, in dB.

        A plan that fails raises a CannotRunError.
        """
        dense = self.dense(item)
        try:
            found = snr(self._latents(item, config), dense)
        except Exception as error:
            raise CannotRunError(_reason(error)) from error
        if not math.isfinite(found):
            raise CannotRunError("its final latents or those of dense are not finite")
        return found

    def _latents(self, item: int, config: ToMeConfig | None) -> Any:
        call = self._call(item).as_latents()
        with Studio(self.pipe) as studio:
            if config is not None:
                studio.add("plan", partial(tokenmerge, config=config))
            return studio.draw(DENSE if config is None else "plan", call)[0]

    def _call(self, item: int) -> PipelineCall:
        what = self.evaluation.items[item]
        return self.call.of_pictures([what.prompt], [what.seed])

    def draw(
        self,
        item: int,
        chosen: Mapping[str, Variant],
        configs: Mapping[str, ToMeConfig],
        on_failure: Callable[[str, str], None],
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Draw dense, then each variant, and yield its name and what its record has, at once.

        The ``cost`` is the wall-clock time since the previous image; that of the first includes dense.
        ``configs`` has the settings of those that have some. ``on_failure`` gets the name and the reason of a
        variant that cannot run.
        """
        began = time.perf_counter()
        call = self._call(item)
        with Studio(self.pipe) as studio:
            dense = self._timed(studio, DENSE, call)
            self._write(Variant(DENSE), item, dense)
            for name, one in chosen.items():
                try:
                    studio.add(name, partial(one.apply, config=configs.get(name)))
                    found = self._timed(studio, name, call.with_steps(one.steps(self.steps)))
                except Exception as error:
                    on_failure(name, _reason(error))
                    continue
                self._write(one, item, found)
                metrics = self._measure(item, found.pictures, dense.pictures)
                now = time.perf_counter()
                times = {"seconds": found.seconds, "dense_seconds": dense.seconds, "cost": now - began}
                yield name, {**times, "metrics": metrics}
                began = now
        free_memory()

    def _timed(self, studio: Studio, name: str, call: PipelineCall) -> Drawing:
        if name not in self._warm and (name == DENSE or self.pipe.device.type != "cpu"):
            studio.warm_up(name, call)
        self._warm.add(name)
        (found,) = studio.rounds({name: call})
        return found

    def _write(self, variant: Variant, item: int, drawing: Drawing) -> None:
        path = self.evaluation.store.picture(variant, self.evaluation.items[item])
        write_atomically(path, drawing.pictures[0].save, advice=CONTINUES)

    def _measure(self, item: int, pictures: list[Image], dense: list[Image]) -> dict[str, float]:
        prompts = [self.evaluation.items[item].prompt]
        found = {}
        for metric in self.metrics.of_pictures:
            value = float(metric.measure(pictures, dense, prompts)[0])
            found[metric.name] = min(value, _EQUAL) if metric.name == "psnr" else value
        return {name: value for name, value in found.items() if math.isfinite(value)}


def _reason(error: Exception) -> str:
    return "out of memory" if is_out_of_memory(error) else why(error)
