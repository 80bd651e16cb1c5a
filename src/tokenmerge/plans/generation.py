"""The generation plan: for each step of a generation, what runs and what merges."""

from __future__ import annotations

import dataclasses
import enum
import functools

from tokenmerge.config import ToMeConfig


class Runs(enum.Enum):
    """What a step runs. The parts that it skips are extrapolated from earlier steps."""

    EVERYTHING = "everything"
    FINEST = "the finest level of a UNet; in other models, what cannot be skipped"
    LEAST = "what cannot be skipped"


class Merging(enum.Enum):
    """What a step merges."""

    MERGES = "tokens merge, as the settings of the step say"
    MEASURES = "nothing merges, and what merging loses is measured, to correct later steps"
    DENSE = "nothing merges"


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What one step of a generation does."""

    runs: Runs = Runs.EVERYTHING
    merging: Merging = Merging.MERGES
    if_due: Merging | None = None  # what it merges if a correction is due in it; None: none ever is
    caches: bool = False  # what it runs is cached, for steps that skip it
    # The parts, "deep" and "finest", that are skipped after a single run. Their output then stays as it is.
    holds: frozenset[str] = frozenset()


GenerationPlan = tuple[StepPlan, ...]


@functools.lru_cache(maxsize=256)
def plan_generation(config: ToMeConfig, steps: int) -> GenerationPlan:
    """Plan each step of a generation of ``steps`` ≥ 1 steps, by the settings at its guidance scale.

    >>> from tokenmerge.config import StepReuse
    >>> plan = plan_generation(ToMeConfig(reuse=StepReuse(every=2)), 6)
    >>> [step.runs.name for step in plan]
    ['EVERYTHING', 'EVERYTHING', 'FINEST', 'EVERYTHING', 'FINEST', 'EVERYTHING']
    """
    settings = [config.at_step(index, steps) for index in range(steps)]
    reuse = config.reuse.steps_of(steps)
    skips = len(reuse.full) < steps
    # After one run, a part is skipped where the second step does not run it.
    holds = frozenset(part for part, ran in (("deep", reuse.full), ("finest", reuse.shallow)) if 1 not in ran)
    fewest = [1 if part in holds else 2 for part in ("deep", "finest")]
    plan: list[StepPlan] = []
    complete = finest = 0  # how often these parts have run and were cached
    merged = 0  # complete steps whose settings merge
    for index, own in enumerate(settings):
        caches = skips and own.reuse.on
        runs = Runs.EVERYTHING
        if caches and index not in reuse.full and complete >= fewest[0]:
            at_finest = index in reuse.shallow or finest < fewest[1]
            runs = Runs.FINEST if at_finest else Runs.LEAST
        complete += caches and runs is Runs.EVERYTHING
        finest += caches and runs is not Runs.LEAST
        merging, if_due = Merging.MERGES if own.merges else Merging.DENSE, None
        if config.correction.on and own.merges:
            corrects_next = index + 1 < steps and settings[index + 1].merges
            if_due = Merging.MEASURES if corrects_next else Merging.DENSE
            if steps == 1:  # there is no step to correct
                if_due = Merging.MERGES
            if runs is Runs.EVERYTHING:
                if merged % config.correction.every == 0:
                    merging = if_due
                merged += 1
        plan.append(StepPlan(runs, merging, if_due, caches, holds))
    return tuple(plan)
