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
        deep: of blocks or deep stages that are skipped: steps since they ran, divided by the interval between
            their last two runs. A tensor, so that compiled blocks need no graph for each value.
        finest: the same for the finest level of a UNet.
        forecasts: for each of these two parts that runs, how far a forecast would have had to reach: that
            distance, and the steps since the part ran.
    """

    runs: Runs = Runs.EVERYTHING
    merging: Merging = Merging.MERGES
    caches: bool = False
    deep: Tensor | None = None
    finest: Tensor | None = None
    forecasts: Mapping[str, tuple[float, int]] = dataclasses.field(default_factory=dict)

    @property
    def measures(self) -> bool:
        """Whether the call is dense and measures what merging loses."""
        return self.merging is Merging.MEASURES


def decide(config: ToMeConfig, tracker: StepTracker, shape: tuple[object, ...]) -> Decision:
    """Follow the generation plan in a call, as far as what is cached allows it.

    Args:
        config: the settings of the generation.
        tracker: of the generation; its running call.
        shape: of the call's inputs, and what else cached results depend on.
    """
    step = tracker.step
    if step is None:
        return Decision()
    plan = plan_generation(config, step.steps)
    planned = plan[step.done]
    runs, deep, finest = planned.runs, None, None
    forecasts: dict[str, tuple[float, int]] = {}
    if planned.caches:
        holds = [1 not in ran for ran in dataclasses.astuple(config.reuse.steps_of(step.steps))]
        for part in ("deep", "finest"):
            if (distance := tracker.distance(part, shape)) is not None:
                forecasts[part] = distance, tracker.gap(part)
        deep = _distance(tracker, "deep", runs is Runs.EVERYTHING, shape, holds[0])
        # A step that runs everything runs the finest level of a UNet too.
        finest = _distance(tracker, "finest", deep is None or runs is not Runs.LEAST, shape, holds[1])
        runs = Runs.EVERYTHING if deep is None else Runs.FINEST if finest is None else Runs.LEAST
    merging = planned.merging
    if config.correction.on and runs is Runs.EVERYTHING and config.at_step(step.done, step.steps).merges:
        # As planned, unless the model joins late, or the shape of its sample changes.
        due = tracker.corrects(config.correction.every, shape)
        merging = merging_to_correct(config, step.done, step.steps) if due else Merging.MERGES
    return Decision(runs, merging, planned.caches, deep, finest, forecasts)


def _distance(
    tracker: StepTracker, part: str, runs: bool, shape: tuple[object, ...], holds: bool
) -> Tensor | None:
    distance = tracker.extrapolation(part, runs, shape, holds)
    return None if distance is None else torch.tensor(distance)
