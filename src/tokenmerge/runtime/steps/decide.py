"""Decides, once for each call of a model, what it runs and what merges in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from tokenmerge.config import ToMeConfig
from tokenmerge.plans.generation import Merging, Runs, merging_to_correct, plan_generation
from tokenmerge.runtime.steps.step_tracker import StepTracker


@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """What one call of a model runs and merges.

    Attributes:
        runs: what runs in it.
        merging: what merges in it.
        caches: whether what runs is cached, for steps that skip it.
        corrected: whether this or another step of the generation measures the error of merging.
        deep: how far blocks or deep stages are extrapolated; None: they run. It is a tensor, so that compiled
            blocks need no graph for each value.
        finest: the same for the finest level of a UNet.
        forecasts: :meth:`StepTracker.forecast` of ``"deep"`` and ``"finest"``, whether they run or not.
    """

    runs: Runs = Runs.EVERYTHING
    merging: Merging = Merging.MERGES
    caches: bool = False
    corrected: bool = False
    deep: Tensor | None = None
    finest: Tensor | None = None
    forecasts: Mapping[str, tuple[float, int]] = dataclasses.field(default_factory=dict)


def decide(config: ToMeConfig, tracker: StepTracker, shape: tuple[object, ...]) -> Decision:
    """Follow the generation plan in the running call, as far as what is cached allows it.

    ``shape`` is that of the call's inputs, and what else cached results depend on.
    """
    if tracker.index < 0:
        return Decision(corrected=config.correction.on)
    planned = plan_generation(config, tracker.steps)[tracker.done]
    runs, merging, deep, finest = planned.runs, planned.merging, None, None
    forecasts: dict[str, tuple[float, int]] = {}
    if planned.caches:
        for part in ("deep", "finest"):
            if (forecast := tracker.forecast(part, shape)) is not None:
                forecasts[part] = forecast
        ran = config.reuse.steps_of(tracker.steps)
        # After one run, a part is skipped where the second step is not complete.
        deep = tracker.extrapolation("deep", runs is Runs.EVERYTHING, shape, holds=1 not in ran.full)
        # A step that runs everything runs the finest level of a UNet too.
        runs_finest = deep is None or runs is not Runs.LEAST
        finest = tracker.extrapolation("finest", runs_finest, shape, holds=1 not in ran.shallow)
        runs = Runs.EVERYTHING if deep is None else Runs.FINEST if finest is None else Runs.LEAST
    own = config.at_step(tracker.done, tracker.steps)
    if config.correction.on and runs is Runs.EVERYTHING and own.merges:
        # As planned, unless the model joins late, or the shape of its sample changes.
        due = tracker.corrects(config.correction.every, shape)
        merging = merging_to_correct(config, tracker.done, tracker.steps) if due else Merging.MERGES
    cached = planned.caches, config.correction.on
    return Decision(runs, merging, *cached, _tensor(deep), _tensor(finest), forecasts)


def _tensor(distance: float | None) -> Tensor | None:
    return None if distance is None else torch.tensor(distance)
