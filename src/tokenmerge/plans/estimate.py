"""How close an image is to the dense one, as its generation shows it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from tokenmerge.config import ToMeConfig
from tokenmerge.plans.choose import merging_error_of, skipping_error_of
from tokenmerge.plans.facts import RunFacts
from tokenmerge.plans.policy import ESTIMATE, LEFT_OF_MISSED

_LEAST = 1e-7  # a squared error that nobody sees
_TINY = 1e-6  # keeps divisions by a noise of zero finite
_UNSEEN_PSNR = 10  # dB, below which a number says no more than that the image is another one
MOST_PSNR = 70.0  # dB of an image whose error nobody sees, by _LEAST
BEFORE_A_RUN = 12  # dB to either side of what is expected: 9 of 10 images, benchmarks/estimate.py --table
_LOOKS = (  # from so many dB to the dense image on
    (40, "hard to tell apart"),
    (35, "small details differ"),
    (30, "larger details differ"),
    (25, "many details differ"),
)


@dataclasses.dataclass(frozen=True)
class Observations:
    """The errors that a generation has shown while it ran."""

    # For the parts "deep" and "finest", and by step, this is the error that the predicted image would have
    # if a forecast had taken the place of the part, in the unit of the latents.
    errors: Mapping[str, Mapping[int, float]] = dataclasses.field(default_factory=dict)
    # The noise of each step, divided by the share of the image, and that after the last one, or an empty
    # sequence if they are unknown.
    sigmas: Sequence[float] = ()
    noise: float = 1.0  # 1 where the scheduler adds none, 2 where it adds as much as DDPM, more where more
    clips: bool = (
        False  # the scheduler clips the image of each step, and keeps the noise that was predicted with it
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
    """How close an image is expected to be to the dense one of the same seed.

    Attributes:
        psnr: expected PSNR in dB, which is infinite for the dense image itself.
        within: 9 of 10 images are at most this many dB from it.
        prompts: number of prompts with which ``tokenmerge tune`` measured on this model how far estimates are
            off. If it is 0, the numbers are those of the small models that the estimate was made on.
    """

    psnr: float
    within: float
    prompts: int = 0

    def __str__(self) -> str:
        if math.isinf(self.psnr):
            return "the dense image itself: nothing was skipped or merged"
        if self.psnr < _UNSEEN_PSNR:
            value = f"below {_UNSEEN_PSNR} dB"
        else:
            low = max(self.psnr - self.within, 0)
            value = f"{self.psnr:.0f} dB ({low:.0f} to {self.psnr + self.within:.0f})"
        if not self.prompts:
            return f"no estimate for this model; on small models {value}"
        prompts = "1 prompt" if self.prompts == 1 else f"{self.prompts} prompts"
        return f"{value}, measured on this model with {prompts}"


def looks(psnr: float) -> str:
    """Return in words how an image differs from the dense one, by its PSNR in dB, as a whole number.

    >>> looks(38)
    'small details differ'
    """
    return next((words for least, words in _LOOKS if round(psnr) >= least), "looks different")


def psnr_of(squared: float) -> float:
    """Return the PSNR in dB of a mean squared error of the image."""
    return -10 * math.log10(squared + _LEAST)


def expected(expected_error: float) -> Estimate:
    """Return how close an image with this expected squared error is, before anything of it has run."""
    return Estimate(psnr_of(expected_error), BEFORE_A_RUN)


def estimate_closeness(facts: RunFacts, config: ToMeConfig, observed: Observations) -> Estimate | None:
    """Estimate how close the image of a generation is, or return None if its errors are not finite.

    Steps that follow one another without a full step between them err in the same direction. Others are
    assumed to be independent. The error of forecasts is a weighted geometric mean of the error that the
    generation has shown and of the error that the policy expects. As long as nothing is observed, it is the
    one that the policy expects, as for token merging. Later errors are assumed to grow with the distance as
    before.
    """
    if not observed.is_finite:
        return None
    # The errors that were shown already include the effect of new noise of the scheduler.
    facts = dataclasses.replace(facts, schedule=facts.schedule._replace(adds_noise=False))
    squared = _squared(config, facts.steps, observed)
    merging = merging_error_of(facts, config)
    skipping = skipping_error_of(facts, config.reuse.steps_of(facts.steps))
    if any(observed.errors.values()):
        if observed.clips:  # the policy was made with schedulers that do not clip
            plain = _squared(config, facts.steps, dataclasses.replace(observed, clips=False))
            skipping *= squared / max(plain, _LEAST**2)
        if facts.makes_good:  # what was shown are the errors of forecasts
            squared *= LEFT_OF_MISSED
        skipping = squared ** ESTIMATE["shown"] * skipping ** (1 - ESTIMATE["shown"])
    return Estimate(psnr_of(skipping + merging), BEFORE_A_RUN if observed.clips else ESTIMATE["within"])


def _squared(config: ToMeConfig, steps: int, observed: Observations) -> float:
    """Return the squared error of the image that the errors of its steps are expected to add up to."""
    errors = _errors(config, steps, observed)
    squared = 0.0
    together = 0.0  # the sum of the errors since the last full step
    for step in range(steps + 1):
        if step in errors:
            together += errors[step]
        else:
            squared += (ESTIMATE["scale"] * together) ** 2
            together = 0.0
    return squared


def influence_of(sigmas: Sequence[float], noise: float = 1.0, clips: bool = False) -> list[float]:
    """Return the share of an error of each step's predicted image that is left in the image.

    A step keeps a share of the noise in its sample, and the predicted image takes the place of the rest.
    Later steps take an error for a part of the image by as much as there is more image than noise. Where
    the predicted image is clipped, its error is cut off, and that of the noise stays. The arguments are
    those of :class:`Observations`.

    >>> [round(share, 2) for share in influence_of([3.0, 1.0, 0.0])]
    [0.33, 1.0]
    >>> [round(share, 2) for share in influence_of([3.0, 1.0, 0.0], noise=2.0)]
    [0.44, 1.0]
    >>> [round(share, 2) for share in influence_of([3.0, 2.0, 0.0], clips=True)]
    [0.22, 1.0]
    """
    left = 1.0
    shares = []
    for before, after in reversed(list(pairwise(sigmas))):
        kept = (after / before) ** noise if before else 1.0
        replaced = 1 - kept
        shares.append(left * (max(replaced, kept) if clips and before else replaced))
        left *= 1 - replaced * before / (1 + before)
    shares.reverse()
    for step, (before, after) in enumerate(pairwise(sigmas[:-1])):
        if before == after and step:  # a scheduler that calls the model twice in a step takes the mean
            half = max(shares[step - 1], shares[step]) / 2
            shares[step - 1] = half
            shares[step] = half
    return shares


def noise_of(kept: float, before: float, after: float) -> float:
    """Return the ``noise`` of :class:`Observations`, from the share of the noise that a step keeps.

    The noise levels are those before and after the step.

    >>> round(noise_of(0.25, 4.0, 2.0), 3)
    2.0
    """
    if not math.isfinite(kept):
        return 1.0
    return max(1.0, math.log(max(kept, _TINY)) / math.log(after / before))


def _errors(config: ToMeConfig, steps: int, observed: Observations) -> dict[int, float]:
    """Return the change in the image that is expected of the forecast of each step that skips a part.

    An error of the predicted image counts less, the larger it is: later steps still draw an image whose
    latents have a standard deviation of about 1, the unit of these errors.
    """
    runs = config.reuse.steps_of(steps)
    if len(observed.sigmas) == steps + 1:
        shares = influence_of(observed.sigmas, observed.noise, observed.clips)
        noise = [sigma / (1 + sigma) for sigma in observed.sigmas[:steps]]
    else:  # the noise is unknown, and all steps count alike
        shares = [1 / steps] * steps
        noise = [1.0] * steps
    deep = _of_steps(runs.full, noise, observed.errors.get("deep", {}))
    # The forecast of the finest level, if the model has one, takes the place of all parts.
    of_finest = observed.errors.get("finest")
    finest = _of_steps(runs.finest, noise, of_finest) if of_finest else {}
    errors = {step: finest.get(step, error) for step, error in deep.items()}
    return {step: shares[step] * error / (1 + error) for step, error in errors.items()}


def _of_steps(ran: Sequence[int], noise: Sequence[float], errors: Mapping[int, float]) -> dict[int, float]:
    """Return the error of each step that skips a part.

    The error of the model's output grows with the steps since the part ran. That of the predicted image
    also follows the noise. If the next run is unknown, the output too is assumed to err less as noise falls.
    """
    found: dict[int, float] = {}
    growth = 0.0  # of the error of the output in one step, by the last error that was measured
    measured = 0  # the step in which that was
    runs = list(pairwise([*ran, len(noise)]))
    # The first error that was measured also counts in the steps before it.
    first = next((run for run in runs if run[1] in errors), None)
    if first is not None:
        runs.insert(0, first)
    for last, after in runs:
        if after in errors:
            growth = errors[after] / (after - last) / max(noise[after], _TINY)
            measured = after
        for step in range(last + 1, after):
            later = noise[step] / max(noise[measured], _TINY) if step > measured else 1.0
            found[step] = growth * noise[step] * later * (step - last)
    return found
