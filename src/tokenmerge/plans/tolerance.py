"""A tolerance: while a generation runs, its estimate decides how many of the planned steps it may skip.

This is the control of the step size in solvers of differential equations. Each complete step shows how wrong
the forecasts were; what they would be at other distances follows from it. So each plan for the steps to come
has an estimate, and the fastest one that keeps the tolerance is taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from tokenmerge.config import Rule, StepReuse, ToMeConfig
from tokenmerge.plans.choose import plan_for, plans_of
from tokenmerge.plans.estimate import Shown, estimate_closeness, psnr_of
from tokenmerge.plans.facts import Facts, speedup_of
from tokenmerge.plans.policy import ESTIMATE


class Tolerance:
    """The settings of one generation whose picture shall be close to the dense one.

    When the generation begins, what merges is chosen by the harm that is expected of it, and stays. While it
    runs, :meth:`follow` changes which of the remaining steps are complete. It never skips more than the plan
    of the wanted speed-up does.

    ``change`` changes settings after they were chosen. ``config`` are those of the generation, with the
    complete steps so far and those that are planned.
    """

    def __init__(
        self, facts: Facts, speedup: float, min_psnr: float, change: Callable[[ToMeConfig], ToMeConfig]
    ) -> None:
        self._facts, self._min_psnr = facts, min_psnr
        wanted = plan_for(facts, speedup)
        self._speedup, self._complete = wanted.speedup, _complete(wanted.config, facts.steps)
        plans = [plan for plan in plans_of(facts) if plan.speedup <= wanted.speedup]
        first = next((plan for plan in reversed(plans) if self._keeps(psnr_of(plan.harm))), plans[0])
        merging = dataclasses.replace(first.config, reuse=StepReuse())
        own = [plan for plan in plans_of(facts, merging) if plan.speedup <= wanted.speedup]
        self._plans = [change(plan.config) for plan in reversed(own)]
        self._seen = 0
        self.config = change(first.config)

    def asks(self, done: int) -> bool:
        """Return whether :meth:`follow` is due: a complete step has just run, and a later one may skip.

        ``done`` is the number of steps of the generation before the running one.
        """
        steps = self._facts.steps
        complete = self.config.reuse.steps_of(steps).full
        # The last step is complete in any case.
        last = steps - 1 + self._facts.ends_clean
        return self._seen < done < last and done - 1 in complete and len(complete) < steps

    def follow(self, done: int, shown: Shown) -> None:
        """Choose what the steps to come run, by what the ``done`` steps before them have shown."""
        self._seen = done
        if shown.errors:
            self.config = next(self._candidates(done, shown))

    def _candidates(self, done: int, shown: Shown) -> Iterator[ToMeConfig]:
        """Yield settings that keep the tolerance, the fastest first; at last, those that are dense now."""
        for config in self._plans:
            config = self._joined(config.reuse, done)
            fits = _complete(config, self._facts.steps) >= self._complete
            fits = fits and speedup_of(self._facts, config) <= self._speedup + 1e-9
            if fits and self._keeps(estimate_closeness(self._facts, config, shown).psnr):
                yield config
        rest = self._joined(StepReuse(), done)
        dense = Rule(start=done / self._facts.steps, changes={"ratio": 0.0})
        merges = rest.at_step(done, self._facts.steps).merges
        yield dataclasses.replace(rest, rules=(*rest.rules, dense)) if merges else rest

    def _joined(self, later: StepReuse, done: int) -> ToMeConfig:
        """Return the settings with the steps so far, and those to come of a plan."""
        steps = self._facts.steps
        before, after = self.config.reuse.steps_of(steps), later.steps_of(steps)
        ran = [
            (*(step for step in one if step < done), *(step for step in other if step >= done))
            for one, other in ((before.full, after.full), (before.shallow, after.shallow))
        ]
        if ran == [before.full, before.shallow]:
            return self.config
        full, shallow = (tuple(step / (steps - 1) for step in own) for own in ran)
        return dataclasses.replace(self.config, reuse=StepReuse(full_steps=full, shallow_steps=shallow))

    def _keeps(self, psnr: float) -> bool:
        """Return whether so much is expected that the picture probably reaches the tolerance."""
        return psnr - ESTIMATE["margin"] >= self._min_psnr


def _complete(config: ToMeConfig, steps: int) -> int:
    return len(config.reuse.steps_of(steps).full)
