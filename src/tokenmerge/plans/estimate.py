"""How close a picture is to the dense one, as its generation shows it, and a tolerance for that.

The tolerance works as the control of the step size in solvers of differential equations. Each complete step
shows how wrong the forecasts were; what they would be at other distances follows from it. So each plan for
the steps to come has an estimate, and the fastest one that keeps the tolerance is taken.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from tokenmerge.config import Rule, StepReuse, ToMeConfig
from tokenmerge.plans.choose import merging_harm_of, plan_for, plans_of, skipping_harm_of
from tokenmerge.plans.facts import Facts, speedup_of
from tokenmerge.plans.policy import ESTIMATE

_LEAST = 1e-7  # a squared error that nobody sees
_TINY = 1e-6
BEFORE_A_RUN = 12  # dB to either side of what is expected: 9 of 10 pictures, benchmarks/estimate.py --table
_LOOKS = (  # from so many dB to the dense picture on
    (40, "hard to tell apart"),
    (35, "small details differ"),
    (30, "larger details differ"),
    (25, "many details differ"),
)


@dataclasses.dataclass(frozen=True)
class Shown:
    """What a generation has shown of its error."""

    # For the parts "deep" and "finest", by step: the error of the predicted picture, in the unit of the
    # latents, had a forecast taken the place of the part.
    errors: Mapping[str, Mapping[int, float]] = dataclasses.field(default_factory=dict)
    # Noise of each step, divided by the share of the picture, and that after the last one; empty: unknown.
    sigmas: Sequence[float] = ()
    noise: float = 1.0  # 1 where the solver adds none, 2 where it adds as much as DDPM, more where more
    clips: bool = (
        False  # the solver clips the picture of each step, and keeps the noise that was predicted with it
    )
    last: float = (
        0.0  # the sum of the model's last output, which is not finite where any of its numbers is not
    )

    @property
    def is_finite(self) -> bool:
        """Whether all errors are numbers; those of latents that are infinite, or no numbers, are not."""
        errors = (error for of_part in self.errors.values() for error in of_part.values())
        return math.isfinite(self.last) and all(map(math.isfinite, errors))


@dataclasses.dataclass(frozen=True)
class Estimate:
    """How close a picture is expected to be to the dense one of the same seed.

    Attributes:
        psnr: expected PSNR in dB; infinite: it is the dense picture.
        within: most pictures are at most this many dB from it.
    """

    psnr: float
    within: float

    def __str__(self) -> str:
        if math.isinf(self.psnr):
            return "the dense picture itself: nothing was skipped or merged"
        if self.psnr < 10:
            return f"below 10 dB to dense: {looks(0)}"
        low, high = max(self.psnr - self.within, 0), self.psnr + self.within
        most = f"(mostly {low:.0f} to {high:.0f} on the bundled models)"
        return f"{self.psnr:.0f} dB to dense {most}: probably {looks(self.psnr)}"


def looks(psnr: float) -> str:
    """Return in words how a picture differs from the dense one, by its PSNR in dB, as a whole number.

    >>> looks(38)
    'small details differ'
    """
    return next((words for least, words in _LOOKS if round(psnr) >= least), "looks different")


def psnr_of(squared: float) -> float:
    """Return the PSNR in dB of a mean squared error of the picture."""
    return -10 * math.log10(squared + _LEAST)


def expected(harm: float) -> str:
    """Return how close a picture with this expected squared error is, such as ``"24 dB to dense …"``."""
    most = f"(mostly {max(psnr_of(harm) - BEFORE_A_RUN, 0):.0f} to {psnr_of(harm) + BEFORE_A_RUN:.0f})"
    return f"{psnr_of(harm):.0f} dB to dense {most}" if psnr_of(harm) >= 10 else "below 10 dB to dense"


def estimate_closeness(facts: Facts, config: ToMeConfig, shown: Shown) -> Estimate | None:
    """Estimate how close the picture of a generation is; None: what it has shown is not finite.

    Steps that follow one another without a complete step between them err in the same direction. Others are
    taken to be independent. What forecasts lose is a weighted geometric mean of what the generation has shown
    and of what the policy expects. As long as nothing is shown, it is what the policy expects. So is what
    token merging loses. Later errors are taken to grow with the distance as before.
    """
    if not shown.is_finite:
        return None
    # What new noise of the solver does to errors is in what was shown.
    facts = dataclasses.replace(facts, schedule=facts.schedule._replace(adds_noise=False))
    squared = _squared(config, facts.steps, shown)
    merging = merging_harm_of(facts, config)
    skipping = skipping_harm_of(facts, config.reuse.steps_of(facts.steps))
    if any(shown.errors.values()):
        if shown.clips:  # the policy was made with solvers that do not clip
            plain = _squared(config, facts.steps, dataclasses.replace(shown, clips=False))
            skipping *= squared / max(plain, _LEAST**2)
        skipping = squared ** ESTIMATE["shown"] * skipping ** (1 - ESTIMATE["shown"])
    return Estimate(psnr_of(skipping + merging), BEFORE_A_RUN if shown.clips else ESTIMATE["within"])


def _squared(config: ToMeConfig, steps: int, shown: Shown) -> float:
    """Return the squared error of the picture that the errors of its steps are expected to add up to."""
    errors, squared, together = _errors(config, steps, shown), 0.0, 0.0
    for step in range(steps + 1):
        if step in errors:
            together += errors[step]
        else:
            squared, together = squared + (ESTIMATE["scale"] * together) ** 2, 0.0
    return squared


def influence_of(sigmas: Sequence[float], noise: float = 1.0, clips: bool = False) -> list[float]:
    """Return which share of an error of each step's predicted picture is left in the picture.

    A step keeps a share of the noise in its sample, and the predicted picture takes the place of the rest.
    Later steps take an error for a part of the picture by as much as there is more picture than noise. Where
    the predicted picture is clipped, its error is cut off, and that of the noise stays. The arguments are
    those of :class:`Shown`.

    >>> [round(share, 2) for share in influence_of([3.0, 1.0, 0.0])]
    [0.33, 1.0]
    >>> [round(share, 2) for share in influence_of([3.0, 1.0, 0.0], noise=2.0)]
    [0.44, 1.0]
    >>> [round(share, 2) for share in influence_of([3.0, 2.0, 0.0], clips=True)]
    [0.22, 1.0]
    """
    left, shares = 1.0, []
    for before, after in reversed(list(pairwise(sigmas))):
        kept = (after / before) ** noise if before else 1.0
        replaced = 1 - kept
        shares.append(left * (max(replaced, kept) if clips and before else replaced))
        left *= 1 - replaced * before / (1 + before)
    shares.reverse()
    for step, (before, after) in enumerate(pairwise(sigmas[:-1])):
        if before == after and step:  # a solver that calls the model twice in a step takes the mean
            shares[step - 1] = shares[step] = max(shares[step - 1 : step + 1]) / 2
    return shares


def noise_of(kept: float, before: float, after: float) -> float:
    """Return the ``noise`` of :class:`Shown`, from the share of the noise in its sample that a step keeps.

    The noise levels are those before and after the step.

    >>> round(noise_of(0.25, 4.0, 2.0), 3)
    2.0
    """
    if not math.isfinite(kept):
        return 1.0
    return max(1.0, math.log(max(kept, _TINY)) / math.log(after / before))


def _errors(config: ToMeConfig, steps: int, shown: Shown) -> dict[int, float]:
    """Return what the forecast of each step that skips a part is expected to change in the picture.

    An error of the predicted picture counts less, the larger it is: later steps still draw a picture whose
    latents have a standard deviation of about 1, the unit of these errors.
    """
    runs, sigmas = config.reuse.steps_of(steps), shown.sigmas
    shares, noise = [1 / steps] * steps, [1.0] * steps  # where the noise is unknown, all steps count alike
    if len(sigmas) == steps + 1:
        shares = influence_of(sigmas, shown.noise, shown.clips)
        noise = [sigma / (1 + sigma) for sigma in sigmas[:steps]]
    deep = _of_steps(runs.full, noise, shown.errors.get("deep", {}))
    # The forecast of the finest level, if the model has one, takes the place of all parts.
    of_finest = shown.errors.get("finest")
    finest = _of_steps(runs.shallow, noise, of_finest) if of_finest else {}
    errors = {step: finest.get(step, error) for step, error in deep.items()}
    return {step: shares[step] * error / (1 + error) for step, error in errors.items()}


def _of_steps(ran: Sequence[int], noise: Sequence[float], errors: Mapping[int, float]) -> dict[int, float]:
    """Return the error of each step that skips a part.

    The error of the model's output grows with the steps since the part ran. That of the predicted picture
    also follows the noise. Where the next run is unknown, the output too is taken to err less as noise falls.
    """
    found: dict[int, float] = {}
    growth, measured = 0.0, 0
    runs = list(pairwise([*ran, len(noise)]))
    # The first error that was measured also counts in the steps before it.
    for last, after in [*[run for run in runs if run[1] in errors][:1], *runs]:
        if after in errors:
            growth, measured = errors[after] / (after - last) / max(noise[after], _TINY), after
        for step in range(last + 1, after):
            later = noise[step] / max(noise[measured], _TINY) if step > measured else 1.0
            found[step] = growth * noise[step] * later * (step - last)
    return found


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
        self._speedup, self._complete = wanted.speedup, len(wanted.config.reuse.steps_of(facts.steps).full)
        plans = [plan for plan in plans_of(facts) if plan.speedup <= wanted.speedup]
        first = next((plan for plan in reversed(plans) if self._keeps(psnr_of(plan.harm))), plans[0])
        merging = dataclasses.replace(first.config, reuse=StepReuse())
        own = [plan for plan in plans_of(facts, merging) if plan.speedup <= wanted.speedup]
        self._plans = [change(plan.config) for plan in reversed(own)]
        self._seen = 0
        self.config = change(first.config)

    def asks(self, done: int) -> bool:
        """Return whether follow is due: the last of ``done`` steps was complete, and one to come may skip."""
        steps = self._facts.steps
        complete = self.config.reuse.steps_of(steps).full
        # The last step is complete in any case.
        last = steps - 1 + self._facts.schedule.ends_clean
        return self._seen < done < last and done - 1 in complete and len(complete) < steps

    def follow(self, done: int, shown: Shown | None) -> None:
        """Choose what the steps to come run, by what the ``done`` steps before them have shown.

        None: the generation could not be observed, so that nothing is known to keep the tolerance but what is
        dense.
        """
        self._seen = done
        if shown is None:
            self.config = self._dense(done)
        elif shown.errors:
            self.config = next(self._candidates(done, shown), self._dense(done))

    def _candidates(self, done: int, shown: Shown) -> Iterator[ToMeConfig]:
        """Yield settings that keep the tolerance, the fastest first."""
        for config in self._plans:
            config = self._joined(config.reuse, done)
            fits = len(config.reuse.steps_of(self._facts.steps).full) >= self._complete
            fits = fits and speedup_of(self._facts, config) <= self._speedup + 1e-9
            estimate = estimate_closeness(self._facts, config, shown) if fits else None
            if estimate is not None and self._keeps(estimate.psnr):
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
