"""The baseline “fewer steps”: how many dense denoising steps fit into the time of a merged run."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Linear model of a dense run's time: ``fixed + per_step · steps`` seconds."""

    fixed: float
    per_step: float

    @classmethod
    def of_two_runs(cls, steps: int, seconds: float, fewer_steps: int, fewer_seconds: float) -> StepCost:
        """Fit the model to two timed runs with different numbers of steps.

        >>> StepCost.of_two_runs(20, 11.0, 10, 6.0)
        StepCost(fixed=1.0, per_step=0.5)
        """
        # With very cheap steps, noise can make the slope negative.
        per_step = max((seconds - fewer_seconds) / (steps - fewer_steps), 0.0)
        return cls(max(seconds - per_step * steps, 0.0), per_step)


def steps_that_fit(budget: float, cost: StepCost, most: int) -> int:
    """The number of dense steps that fit into ``budget`` seconds, at least 1 and at most ``most``.

    >>> steps_that_fit(6.2, StepCost(fixed=1.0, per_step=0.5), most=20)
    10
    """
    if cost.per_step == 0:
        return most
    # The small constant allows for rounding errors.
    return min(max(math.floor((budget - cost.fixed) / cost.per_step + 1e-9), 1), most)
