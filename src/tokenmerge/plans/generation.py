"""The generation plan: for each step of a generation, the parts that run and whether tokens merge."""

from __future__ import annotations

import dataclasses
import enum
import functools

from tokenmerge.config import ToMeConfig


class StepKind(enum.Enum):
    """What a step runs of the model. What it skips is extrapolated from earlier steps."""

    FULL = "full"  # every part of the model
    SHALLOW = "shallow"  # only the finest level of a UNet
    SKIPPED = "skipped"  # no block

    def in_model(self, is_unet: bool) -> StepKind:
        """Return the kind of a planned step in a model: without a finest level, a shallow step is skipped."""
        return StepKind.SKIPPED if self is StepKind.SHALLOW and not is_unet else self


def least_kind(*kinds: StepKind) -> StepKind:
    """Return the kind of a step, by those of its calls: that of the call which runs least.

    >>> least_kind(StepKind.FULL, StepKind.SKIPPED, StepKind.SHALLOW)
    <StepKind.SKIPPED: 'skipped'>
    """
    return max(kinds, key=list(StepKind).index)


class Merging(enum.Enum):
    """Whether tokens merge in a step."""

    MERGES = "tokens merge, as the settings of the step say"
    MEASURES = "nothing merges, and what merging loses is measured, to correct later steps"
    DENSE = "nothing merges"


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """The plan of one step of a generation."""

    kind: StepKind = StepKind.FULL
    merging: Merging = Merging.MERGES
    # Whether tokens merge if a correction is due in the step, or None if no correction ever is.
    if_due: Merging | None = None
    caches: bool = False  # the outputs of the parts that it runs are cached, for steps that skip them
    # The parts, "deep" and "finest", that are skipped after a single run. Their output then stays as it is.
    holds: frozenset[str] = frozenset()


GenerationPlan = tuple[StepPlan, ...]


@functools.lru_cache(maxsize=256)
def plan_generation(config: ToMeConfig, steps: int) -> GenerationPlan:
    """Plan each step of a generation of ``steps`` ≥ 1 steps, by the settings at its guidance scale.

    >>> from tokenmerge.config import StepReuse
    >>> plan = plan_generation(ToMeConfig(reuse=StepReuse(every=2)), 6)
    >>> [step.kind.value for step in plan]
    ['full', 'full', 'shallow', 'full', 'shallow', 'full']
    """
    settings = [config.at_step(index, steps) for index in range(steps)]
    reuse = config.reuse.steps_of(steps)
    skips = len(reuse.full) < steps
    # After one run, a part is skipped where the second step does not run it.
    runs_of = {"deep": reuse.full, "finest": reuse.finest}
    holds = frozenset(part for part, ran in runs_of.items() if 1 not in ran)
    # The number of runs after which a part can be skipped.
    fewest_deep = 1 if "deep" in holds else 2
    fewest_finest = 1 if "finest" in holds else 2
    plan: list[StepPlan] = []
    # How often the deep stages and the finest level have run and were cached.
    full = 0
    finest = 0
    merged = 0  # full steps whose settings merge
    for index, step_settings in enumerate(settings):
        caches = skips and step_settings.reuse.on
        kind = StepKind.FULL
        if caches and index not in reuse.full and full >= fewest_deep:
            at_finest = index in reuse.finest or finest < fewest_finest
            kind = StepKind.SHALLOW if at_finest else StepKind.SKIPPED
        if caches and kind is StepKind.FULL:
            full += 1
        if caches and kind is not StepKind.SKIPPED:
            finest += 1
        merging = Merging.MERGES if step_settings.merges else Merging.DENSE
        if_due = None
        if config.correction.on and step_settings.merges:
            corrects_next = index + 1 < steps and settings[index + 1].merges
            if_due = Merging.MEASURES if corrects_next else Merging.DENSE
            if steps == 1:  # there is no step to correct
                if_due = Merging.MERGES
            if kind is StepKind.FULL:
                if merged % config.correction.every == 0:
                    merging = if_due
                merged += 1
        plan.append(StepPlan(kind, merging, if_due, caches, holds))
    return tuple(plan)
