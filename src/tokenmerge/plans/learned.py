"""What is learned of the estimates on one model: how far they were off, and how sure one can be of that."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import NormalDist, fmean
from typing import NamedTuple

from tokenmerge.config import EstimateErrors, OffAtSpeed
from tokenmerge.plans.estimate import Estimate
from tokenmerge.plans.policy import ESTIMATE

# The spread of prompts around the mean error of the estimates at one speed of one small model, in dB, by
# benchmarks/estimate_cpu.jsonl and tolerance_cpu.jsonl. It counts as much as that of some prompts.
_USUAL_SPREAD_BEFORE = 3.0
_USUAL_SPREAD_AFTER = 2.5
_COUNTS_FOR = 3  # prompts
_ONE_SIDED = NormalDist().inv_cdf(0.9)  # 9 of 10 images are better
_TWO_SIDED = NormalDist().inv_cdf(0.95)  # 9 of 10 images are between the bounds
_ROUNDED = 3  # digits after the decimal point


class Measured(NamedTuple):
    """One image: number of its prompt, speed-up by operations, and its PSNR to dense in dB.

    ``before`` and ``after`` are the estimates before and after its run.
    """

    prompt: int
    speedup: float
    psnr: float
    before: float
    after: float


def learn(images: Sequence[Measured]) -> EstimateErrors:
    """Return how far the estimates were off. There are at least two prompts at each speed."""
    by_speed: dict[float, list[Measured]] = defaultdict(list)
    for image in images:
        by_speed[round(image.speedup, _ROUNDED)].append(image)
    off = []
    before = []
    after = []
    for speedup, images_at_speed in sorted(by_speed.items()):
        errors_before = [image.psnr - image.before for image in images_at_speed]
        errors_after = [image.psnr - image.after for image in images_at_speed]
        mean_before = round(fmean(errors_before), _ROUNDED)
        mean_after = round(fmean(errors_after), _ROUNDED)
        off.append(OffAtSpeed(speedup, mean_before, mean_after))
        before.append(_variance(errors_before))
        after.append(_variance(errors_after))
    prompts = len({image.prompt for image in images})
    freedom = prompts - 1 + _COUNTS_FOR
    return EstimateErrors(
        prompts,
        tuple(off),
        spread_before=_mixed(before, prompts, _USUAL_SPREAD_BEFORE),
        spread_after=_mixed(after, prompts, _USUAL_SPREAD_AFTER),
        freedom=freedom,
    )


def _variance(errors: Sequence[float]) -> float:
    mean = fmean(errors)
    return sum((error - mean) ** 2 for error in errors) / max(len(errors) - 1, 1)


def _mixed(variances: Sequence[float], prompts: int, usual: float) -> float:
    """Return the spread, in which that of small models counts as much as that of some prompts."""
    freedom = prompts - 1
    variance = (freedom * fmean(variances) + _COUNTS_FOR * usual**2) / (freedom + _COUNTS_FOR)
    return round(math.sqrt(variance), _ROUNDED)


def off_at(errors: EstimateErrors, speedup: float, after: bool) -> float:
    """Return how far an estimate is off at a speed-up, between those that were measured by interpolation.

    The error of an estimate ``after`` a run differs from that of one before it.
    """
    values = [one.after if after else one.before for one in errors.off]
    speeds = [one.speedup for one in errors.off]
    if speedup <= speeds[0]:
        return values[0]
    for (lower, of_lower), (upper, of_upper) in pairwise(zip(speeds, values, strict=True)):
        if speedup <= upper:
            share = math.log(speedup / lower) / math.log(upper / lower)
            return of_lower + share * (of_upper - of_lower)
    return values[-1]


def corrected(errors: EstimateErrors, psnr: float, speedup: float, after: bool) -> Estimate:
    """Return the estimate that follows from one of a small model and from what was measured on this model."""
    spread = errors.spread_after if after else errors.spread_before
    within = nine_of_ten_between(spread, errors.prompts, errors.freedom)
    return Estimate(psnr + off_at(errors, speedup, after), within, errors.prompts)


def margin_of(errors: EstimateErrors | None) -> float:
    """Return by how many dB an estimate must be above a closeness that 9 of 10 images shall keep.

    It is for estimates before a run. Without ``errors`` that were measured on the model, it is that of small
    models, which also holds for estimates while an image is drawn.
    """
    if errors is None:
        return float(ESTIMATE["margin"])
    return nine_of_ten(errors.spread_before, errors.prompts, errors.freedom)


def nine_of_ten(spread: float, prompts: int, freedom: int) -> float:
    """Return how far from the mean of some prompts one more is in 9 of 10 cases, to one side.

    >>> round(nine_of_ten(2.0, 4, 3), 1)
    3.7
    """
    return _prediction_bound(spread, prompts, freedom, _ONE_SIDED)


def nine_of_ten_between(spread: float, prompts: int, freedom: int) -> float:
    """Return how far from the mean of some prompts one more is in 9 of 10 cases, to either side.

    >>> round(nine_of_ten_between(2.0, 4, 3), 1)
    5.2
    """
    return _prediction_bound(spread, prompts, freedom, _TWO_SIDED)


def _prediction_bound(spread: float, prompts: int, freedom: int, normal: float) -> float:
    """Return how far from the mean of some prompts one more is, by Student's t-distribution.

    ``normal`` is the quantile of the normal distribution. Those of the t-distribution follow from it by the
    expansion of Fisher and Cornish.
    """
    first = (normal**3 + normal) / (4 * freedom)
    second = (5 * normal**5 + 16 * normal**3 + 3 * normal) / (96 * freedom**2)
    third = (3 * normal**7 + 19 * normal**5 + 17 * normal**3 - 15 * normal) / (384 * freedom**3)
    return (normal + first + second + third) * spread * math.sqrt(1 + 1 / prompts)
