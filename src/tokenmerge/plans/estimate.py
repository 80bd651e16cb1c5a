"""How close a picture is to the dense one, estimated from what the generation itself has shown."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable, Mapping
from itertools import pairwise

from tokenmerge.config import ToMeConfig
from tokenmerge.plans.choose import reach
from tokenmerge.plans.policy import estimate_of

PARTS = ("deep", "finest")
LEAST = 1e-7  # a squared error that nobody sees


@dataclasses.dataclass(frozen=True)
class Estimate:
    """How close a picture is expected to be to the dense one of the same seed.

    Attributes:
        psnr: expected PSNR in dB.
        within: most pictures are at most this many dB from it.
        worst_step: index of the step whose forecast is expected to be most wrong; None: no step had one.
    """

    psnr: float
    within: float
    worst_step: int | None = None

    def __str__(self) -> str:
        worst = "" if self.worst_step is None else f"; most of it at step {self.worst_step}"
        return f"{self.psnr:.0f} ± {self.within:.0f} dB to the dense picture{worst}"


def estimate_closeness(
    harm: float, config: ToMeConfig, steps: int, noted: Mapping[str, Mapping[int, float]]
) -> Estimate:
    """Estimate how close the picture of a generation is.

    Args:
        harm: squared error that the plan expected, whose values are from 0 to 1.
        config: settings of the generation.
        steps: number of its steps.
        noted: for the parts ``"deep"`` and ``"finest"``, the relative error that a forecast would have had in
            each step that ran the part.
    """
    numbers, errors = estimate_of(), _errors(config, steps, noted)
    logs = log_features(harm, config, steps, noted)
    squared = math.exp(sum(map(operator.mul, numbers["weights"], logs)))
    worst = max(errors, key=lambda step: errors[step], default=None)
    return Estimate(-10 * math.log10(squared), numbers["within"], worst)


def log_features(
    harm: float, config: ToMeConfig, steps: int, noted: Mapping[str, Mapping[int, float]]
) -> tuple[float, float, float]:
    """Return what the logarithm of the squared error is a weighted sum of; the arguments are the same."""
    shown = sum(_errors(config, steps, noted).values()) / steps
    return 1.0, math.log(harm + LEAST), math.log(shown + LEAST)


def _errors(config: ToMeConfig, steps: int, noted: Mapping[str, Mapping[int, float]]) -> dict[int, float]:
    """Return the expected squared error of the forecasts of each step that skips a part."""
    runs = config.reuse.steps_of(steps)
    errors: dict[int, float] = {}
    for part, ran in zip(PARTS, (runs.full, runs.shallow), strict=True):
        for step, error in _of_steps(ran, noted.get(part, {})):
            errors[step] = errors.get(step, 0.0) + error**2
    return errors


def _of_steps(ran: Iterable[int], noted: Mapping[int, float]) -> Iterable[tuple[int, float]]:
    """Yield each step that skipped a part, and its error: that of the next run, over a shorter distance."""
    steps = list(ran)
    for (before, last), following in zip(pairwise(steps), steps[2:], strict=False):
        if following in noted:
            whole = reach(following, last, before)
            for step in range(last + 1, following):
                yield step, noted[following] * reach(step, last, before) / whole
