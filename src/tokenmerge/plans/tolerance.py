"""A tolerance: while a generation runs, its plan changes so that the image stays close to the dense one.

It works as the control of the step size in solvers of differential equations. Each full step
shows how wrong the forecasts were; what they would be at other distances follows from it. So each plan for
the steps to come has an estimate, and the fastest one that keeps the tolerance is taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from tokenmerge.config import EstimateErrors, Rule, StepReuse, ToMeConfig
from tokenmerge.plans.choose import SpeedupPlan, plan_for, plans_of
from tokenmerge.plans.estimate import Observations, estimate_closeness, psnr_of
from tokenmerge.plans.facts import RunFacts, speedup_of
from tokenmerge.plans.learned import corrected, margin_of

_ROUNDING = 1e-9  # by which equal speed-ups may differ


def fastest_close_plan(
    facts: RunFacts, speedup: float, min_psnr: float, learned: EstimateErrors | None = None
) -> SpeedupPlan:
    """Return the fastest plan, up to a speed-up, that is expected to keep a closeness before a run.

    If no plan is, it is the slowest one. ``learned`` says how far estimates are off on this model, if it was
    measured.
    """
    most = plan_for(facts, speedup).speedup
    plans = [plan for plan in plans_of(facts) if plan.speedup <= most]
    aim = min_psnr + margin_of(learned)
    return next((plan for plan in reversed(plans) if _expected_psnr(plan, learned) >= aim), plans[0])


def _expected_psnr(plan: SpeedupPlan, learned: EstimateErrors | None) -> float:
    psnr = psnr_of(plan.expected_error)
    return psnr if learned is None else corrected(learned, psnr, plan.speedup, after=False).psnr


class Tolerance:
    """The settings of one generation whose image shall be close to the dense one.

    When the generation begins, what merges is chosen by its expected error, and stays. While it
    runs, :meth:`follow` changes which of the remaining steps are full. It never skips more than the plan
    of the wanted speed-up does.

    ``change`` changes settings after they were chosen. ``config`` are the settings of the generation, with
    the full steps so far and those that are planned.
    """

    def __init__(
        self,
        facts: RunFacts,
        speedup: float,
        min_psnr: float,
        change: Callable[[ToMeConfig], ToMeConfig],
    ) -> None:
        self._facts = facts
        self._min_psnr = min_psnr
        wanted = plan_for(facts, speedup)
        self._speedup = wanted.speedup
        self._full = len(wanted.config.reuse.steps_of(facts.steps).full)
        first = fastest_close_plan(facts, speedup, min_psnr)
        merging = dataclasses.replace(first.config, reuse=StepReuse())
        same_merging = [plan for plan in plans_of(facts, merging) if plan.speedup <= wanted.speedup]
        self._plans = [change(plan.config) for plan in reversed(same_merging)]
        self._seen = 0
        self.config = change(first.config)

    def asks(self, done: int) -> bool:
        """Return whether follow is due: the last of ``done`` steps was full, and one to come may skip."""
        steps = self._facts.steps
        full = self.config.reuse.steps_of(steps).full
        # The last step is full in any case, unless almost no noise is left before it.
        last = steps if self._facts.schedule.ends_clean else steps - 1
        return self._seen < done < last and done - 1 in full and len(full) < steps

    def follow(self, done: int, observed: Observations | None) -> None:
        """Choose the parts that the steps to come run, by the errors that the ``done`` steps have shown.

        If ``observed`` is None, the generation could not be observed. Then the steps to come are dense, since
        nothing else is known to keep the tolerance.
        """
        self._seen = done
        if observed is None:
            self.config = self._dense(done)
        elif observed.errors:
            self.config = next(self._candidates(done, observed), self._dense(done))

    def _candidates(self, done: int, observed: Observations) -> Iterator[ToMeConfig]:
        """Yield settings that keep the tolerance, the fastest first."""
        for config in self._plans:
            config = self._joined(config.reuse, done)
            fits = len(config.reuse.steps_of(self._facts.steps).full) >= self._full
            speedup = speedup_of(self._facts, config)
            if not fits or speedup > self._speedup + _ROUNDING:
                continue
            estimate = estimate_closeness(self._facts, config, observed)
            if estimate is not None and estimate.psnr - margin_of(None) >= self._min_psnr:
                yield config

    def _dense(self, done: int) -> ToMeConfig:
        """Return the settings with the steps so far, and dense ones to come."""
        rest = self._joined(StepReuse(), done)
        dense = Rule(start=done / self._facts.steps, changes={"ratio": 0.0})
        merges = rest.at_step(done, self._facts.steps).merges
        return dataclasses.replace(rest, rules=(*rest.rules, dense)) if merges else rest

    def _joined(self, later: StepReuse, done: int) -> ToMeConfig:
        """Return the settings with the steps so far, and those to come of a plan."""
        steps = self._facts.steps
        before = self.config.reuse.steps_of(steps)
        after = later.steps_of(steps)

        def joined(ran: tuple[int, ...], planned: tuple[int, ...]) -> tuple[int, ...]:
            so_far = (step for step in ran if step < done)
            to_come = (step for step in planned if step >= done)
            return (*so_far, *to_come)

        full = joined(before.full, after.full)
        finest = joined(before.finest, after.finest)
        if full == before.full and finest == before.finest:
            return self.config
        reuse = StepReuse(
            full_steps=tuple(step / (steps - 1) for step in full),
            shallow_steps=tuple(step / (steps - 1) for step in finest),
        )
        return dataclasses.replace(self.config, reuse=reuse)
