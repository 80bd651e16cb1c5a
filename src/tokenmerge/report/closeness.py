"""How close the image of the last generation is to the dense one, and why there is no estimate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from tokenmerge.plans import Estimate, RunFacts
from tokenmerge.plans.estimate import estimate_closeness
from tokenmerge.plans.generation import StepKind
from tokenmerge.runtime.memory.run_log import RunLog, observations_of

_NOT_FINITE = "the latents had numbers that are infinite, or no numbers (NaN)"
FactsOfRun = Callable[[RunLog], RunFacts]


class Closeness(NamedTuple):
    """The estimate of a generation, or the reason why there is none."""

    estimate: Estimate | None = None
    why_none: str = ""  # empty where there is an estimate, and before the first generation


def closeness_of(run: RunLog | None, facts_of: FactsOfRun | None) -> Closeness:
    """Return how close the image of the last generation is, as far as it is known.

    ``facts_of`` returns the facts about a generation of the default method. It is None for other settings.
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
    if facts_of is None:
        return Closeness(why_none="only speedup= has one")
    found = run.observe(_estimate_of, run, facts_of)
    if found is None:
        return Closeness(why_none=run.unseen or _NOT_FINITE)
    return Closeness(found)


def _estimate_of(run: RunLog, facts_of: FactsOfRun) -> Estimate | None:
    """Return the estimate of a generation of the default method, or None if its errors are not finite."""
    return estimate_closeness(facts_of(run), run.config, observations_of([run]))
