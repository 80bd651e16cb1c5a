"""Generation plans of one speed: the rule's, and the neighbours of a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from random import Random

from tokenmerge.config import StepReuse, ToMeConfig
from tokenmerge.plans import RunFacts, plan_for, speedup_of
from tokenmerge.plans.generation import plan_generation
from tokenmerge.report.notes import signs_of

# What a step runs: everything, what step reuse never skips and a UNet's finest level, or not even that.
COMPLETE = "M"
FINEST = "s"
LEAST = "·"
_SIGNS = LEAST + FINEST + COMPLETE
_RATIO_STEPS = (-0.1, -0.05, 0.05, 0.1)
_LEAST_RATIO, _MOST_RATIO = 0.1, 0.75
_NEAR = 3  # steps; two steps that swap are most often no farther apart
_SHARE_OF_NEAR = 0.7  # of the swaps
_DIGITS = 5  # of a place
_TRIES = 200  # changes that are tried for one plan


@dataclasses.dataclass(frozen=True)
class SearchedPlan:
    """One generation plan.

    Attributes:
        merging: the settings of token merging, without step reuse.
        runs: a sign for each step. ``M`` runs everything, and ``s`` runs no deep stages or blocks. ``·`` does
            not run a UNet's finest level either. In other models, ``·`` is the same as ``s``.
    """

    merging: ToMeConfig
    runs: str

    @classmethod
    def of(cls, config: ToMeConfig, steps: int) -> SearchedPlan:
        """Return the plan of settings in a generation of ``steps`` steps."""
        found = config.reuse.steps_of(steps)
        complete = found.full if config.reuse.on else range(steps)
        finest = found.finest if config.reuse.skips_finest else range(steps)
        runs = ""
        for i in range(steps):
            if i in complete:
                runs += COMPLETE
            elif i in finest:
                runs += FINEST
            else:
                runs += LEAST
        return cls(dataclasses.replace(config, reuse=StepReuse()), runs)

    @property
    def config(self) -> ToMeConfig:
        """The settings of the plan, with explicit places."""
        if set(self.runs) == {COMPLETE}:
            return self.merging
        reuse = StepReuse(full_steps=self._places(COMPLETE), shallow_steps=self._places(FINEST))
        return dataclasses.replace(self.merging, reuse=reuse)

    @property
    def name(self) -> str:
        """A short name, such as ``"MMsMsMsM ratio 0.5"``, with the signs of a patch that is printed."""
        merging = self.merging
        plan = plan_generation(self.config, len(self.runs))
        signs = signs_of(plan, merges=merging.ratio > 0, is_unet=True)
        complete = (sign if own == COMPLETE else own for own, sign in zip(self.runs, signs, strict=True))
        words = ["".join(complete)]
        if merging.ratio:
            words.append(f"ratio {merging.ratio:g}")
            if merging.scope == "block":
                words.append("whole blocks")
            if merging.correction.on:
                words.append(f"corrected every {merging.correction.every}")
        return " ".join(words)

    def _places(self, sign: str) -> tuple[float, ...]:
        last = len(self.runs) - 1
        return tuple(round(i / last, _DIGITS) for i, own in enumerate(self.runs) if own == sign)


@dataclasses.dataclass(frozen=True, eq=False)
class Budget:
    """The speed-up that plans of one kind of generation have to reach, by operations."""

    facts: RunFacts
    speedup: float
    _known: dict[tuple[ToMeConfig, int, int], float] = dataclasses.field(default_factory=dict, repr=False)

    def counted(self, plan: SearchedPlan) -> float:
        """Return the speed-up of a plan. It depends on how many steps run what, and not on their places."""
        key = plan.merging, plan.runs.count(COMPLETE), plan.runs.count(FINEST)
        if key not in self._known:
            self._known[key] = speedup_of(self.facts, plan.config)
        return self._known[key]

    def allows(self, plan: SearchedPlan) -> bool:
        """Return whether a plan is as fast as was asked for, or as that of the default method."""
        return self.counted(plan) >= min(self.speedup, plan_for(self.facts, self.speedup).speedup)


def rule_plan(facts: RunFacts, speedup: float) -> SearchedPlan:
    """Return the plan of the default method."""
    return SearchedPlan.of(plan_for(facts, speedup).config, facts.steps)


def neighbours(plan: SearchedPlan, budget: Budget, random: Random) -> Iterator[SearchedPlan]:
    """Yield plans that differ a little and reach the speed-up, by operations.

    Two steps swap what they run; a step runs more, and others less; or the ratio changes, and steps run less
    or more as the speed-up demands. The first step runs everything.
    """
    kinds = ["swap", "swap", "trade"]
    if plan.merging.ratio > 0:
        kinds.append("ratio")
    for _ in range(_TRIES):
        kind = random.choice(kinds)
        if kind == "swap":
            changed = _swapped(plan, random)
        elif kind == "trade":
            changed = _fitted(_shifted(plan, random, 1) or plan, budget, random)
        else:
            ratio = round(plan.merging.ratio + random.choice(_RATIO_STEPS), 2)
            if not _LEAST_RATIO <= ratio <= _MOST_RATIO:
                continue
            merging = dataclasses.replace(plan.merging, ratio=ratio, sx=4 if ratio > 0.5 else 2)
            changed = _fitted(dataclasses.replace(plan, merging=merging), budget, random)
        if changed is not None and changed != plan and budget.allows(changed):
            yield changed


def _swapped(plan: SearchedPlan, random: Random) -> SearchedPlan | None:
    """Swap what two steps run; most often they are near each other."""
    steps = len(plan.runs)
    first = random.randrange(1, steps)
    far = [i for i in range(1, steps) if plan.runs[i] != plan.runs[first]]
    near = [i for i in far if abs(i - first) <= _NEAR]
    if not far:
        return None
    second = random.choice(near if near and random.random() < _SHARE_OF_NEAR else far)
    runs = list(plan.runs)
    runs[first], runs[second] = runs[second], runs[first]
    return dataclasses.replace(plan, runs="".join(runs))


def _shifted(plan: SearchedPlan, random: Random, by: int) -> SearchedPlan | None:
    """Let a step that is drawn at random run more (1) or less (−1), or return None if none can."""
    kinds = "".join(sign for sign in _SIGNS if sign in plan.runs)
    if by < 0 and len(kinds) == 1:
        kinds = _SIGNS[_SIGNS.index(kinds[0]) - 1] + kinds[0]
    last = kinds[-1] if by > 0 else kinds[0]
    able = [i for i in range(1, len(plan.runs)) if plan.runs[i] != last]
    if not able:
        return None
    step = random.choice(able)
    runs = list(plan.runs)
    runs[step] = kinds[kinds.index(runs[step]) + by]
    return dataclasses.replace(plan, runs="".join(runs))


def _fitted(plan: SearchedPlan, budget: Budget, random: Random) -> SearchedPlan | None:
    """Let steps run less until the plan reaches the speed-up, then more while it does."""
    while not budget.allows(plan):
        less = _shifted(plan, random, -1)
        if less is None:
            return None
        plan = less
    while True:
        more = _shifted(plan, random, 1)
        if more is None or not budget.allows(more):
            return plan
        plan = more
