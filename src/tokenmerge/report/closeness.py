"""How close the image of the last generation is to the dense one, and why there is no estimate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from tokenmerge.plans import Estimate
from tokenmerge.plans.generation import StepKind
from tokenmerge.runtime.memory.run_log import RunLog

_NOT_FINITE = "the latents had numbers that are infinite, or no numbers (NaN)"
EstimateOfRun = Callable[[RunLog], Estimate | None]


class Closeness(NamedTuple):
    """The estimate of a generation, or the reason why there is none."""

    estimate: Estimate | None = None
    why_none: str = ""  # empty where there is an estimate, and before the first generation


def closeness_of(run: RunLog | None, estimate_of: EstimateOfRun | None) -> Closeness:
    """Return how close the image of the last generation is, as far as it is known.

    ``estimate_of`` returns the estimate of a generation of the default method, or None if its errors are not
    finite. It is None for other settings.
    """
    if run is None or not run.steps:
        return Closeness()
    if run.unseen:
        return Closeness(why_none=run.unseen)
    if run.kind_of_step and not run.ended:
        return Closeness(why_none=f"only {run.kinds.total()} of {run.steps} steps have run")
    all_full = run.kinds == {StepKind.FULL: run.steps}
    changes_nothing = not (run.config.merges or run.config.reuse.on)
    if changes_nothing or (all_full and not run.merging_steps):
        return Closeness(Estimate(math.inf, 0.0))
    if estimate_of is None:
        return Closeness(why_none="only speedup= has one")
    found = run.observe(estimate_of, run)
    if found is None:
        return Closeness(why_none=run.unseen or _NOT_FINITE)
    return Closeness(found)
