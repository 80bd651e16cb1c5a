"""The mix of merging and step reuse that reaches a speed-up with the least expected error."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tokenmerge.config import Correction, MergeSharing, StepReuse, ToMeConfig
from tokenmerge.config.parts import QUOTIENT_ROUNDING, StepsOfReuse
from tokenmerge.plans import policy
from tokenmerge.plans.facts import RunFacts, costs_of
from tokenmerge.plans.falling import falling, width_of_cells

# The ratios of token merging that are tried, by scope, and the distances of corrections. With a tenth of the
# tokens, whole blocks are 7 dB closer than with a fifth (benchmarks/stacks_cpu.jsonl). By the clock they
# often save less than half of what is counted then (benchmarks/fewest_tokens_cpu.jsonl).
_RATIOS = {"block": tuple(i / 40 for i in range(4, 31)), "layers": tuple(i / 40 for i in range(8, 31))}
# More than all steps: the first step alone is a correction.
FIRST_STEP_ALONE = 10_000
_CORRECTIONS = (0, 2, 3, 4, 6, 8, 12, FIRST_STEP_ALONE)
_DEEPEST = 8  # level that merges
# Above this ratio, cells are twice as wide around attention: with fewer destinations, more sources are left.
_CROWDED = 0.5
_MOST_COUNTS = 32  # numbers of full steps that are tried, spread over all
_FEWEST = 3  # full steps: the first two and the last
_REFERENCE = 20  # steps of the generations that reaches are compared with
_ROUNDING_OF_DIGITS = 1e-6  # keeps a product that is a whole number from being rounded down to the one below
# A speed-up is reached where two decimals show it. Ten of 20 steps of a transformer give 1.997×, since its
# first and its last layer always run: nine would give 2.22×, and twice the expected error.
ROUNDING = 0.005


@dataclasses.dataclass(frozen=True)
class SpeedupPlan:
    """The settings of one mix of token merging and step reuse."""

    config: ToMeConfig
    speedup: float  # dense operations over those with these settings, for the whole generation
    # Expected squared error to the dense image, whose range is 0 to 1, by which plans compare.
    expected_error: float


def plan_for(facts: RunFacts, speedup: float) -> SpeedupPlan:
    """Return the plan with the smallest expected error that reaches a speed-up, or the fastest one.

    Its settings are explicit: they give the same images when they are applied by themselves. ``speedup``
    is dense operations over those of the generation. With 1 everything is dense, and with infinity the plan
    is the fastest one.
    """
    plans = plans_of(facts)
    if speedup <= 1:  # also where the last step could be skipped for nothing
        dense = _Mix(next(_mergings(facts)), 0, facts.steps, facts.steps, speedup=1.0, expected_error=0.0)
        return SpeedupPlan(_settings(facts, dense), dense.speedup, dense.expected_error)
    return next((plan for plan in plans if plan.speedup + ROUNDING >= speedup), plans[-1])


@functools.lru_cache(maxsize=128)
def plans_of(facts: RunFacts, merging: ToMeConfig | None = None) -> tuple[SpeedupPlan, ...]:
    """Return the plans that no other mix beats in both speed and expected error, the slowest first.

    Of these, a faster one has a larger expected error. ``merging`` are settings of token merging that all of
    them have, or None if they may have any.
    """
    best: list[_Mix] = []
    for mix in sorted(_mixes(facts, merging), key=lambda mix: (-mix.speedup, mix.expected_error)):
        if not best or mix.expected_error < best[-1].expected_error:
            best.append(mix)
    return tuple(
        SpeedupPlan(_settings(facts, mix), mix.speedup, mix.expected_error) for mix in reversed(best)
    )


class _Mix(NamedTuple):
    """Settings of token merging and numbers of steps, with speed-up and expected error."""

    merging: ToMeConfig  # but for its corrections
    every: int  # the distance of its corrections
    full: int
    finest: int
    speedup: float
    expected_error: float


def merging_error_of(facts: RunFacts, config: ToMeConfig) -> float:
    """Return the expected squared error of token merging in a generation with these settings."""
    steps = facts.steps
    full = len(config.reuse.steps_of(steps).full)
    expected_error = _merging_error(facts, config, config.correction.every, full)
    return expected_error * sum(config.at_step(step, steps).merges for step in range(steps)) / steps


def skipping_error_of(facts: RunFacts, runs: StepsOfReuse) -> float:
    """Return the expected squared error of step reuse in a generation with these runs."""
    inner = "deep" if "deep" in facts.work.parts else "blocks"
    return _of_runs(facts, inner, runs.full) + _of_runs(facts, "finest", runs.finest)


def _merging_error(facts: RunFacts, merging: ToMeConfig, every: int, full: int) -> float:
    """Return the expected error of merging in so many full steps, if all of them merge.

    One full step in ``every`` is a correction.
    """
    # The steps from one correction to the next, or to the end.
    between = min(every, full) * facts.steps / full
    return _expected_errors(facts).of_merging(merging.scope, merging.ratio, between, merging.proportional)


def _expected_errors(facts: RunFacts) -> policy.ExpectedErrors:
    # New noise changes what the model's finest level sees, as strong guidance does. The weak rows were fitted
    # on schedulers that add none.
    return policy.expected_errors_of(facts.model, None if facts.schedule.adds_noise else facts.guidance)


def _mixes(facts: RunFacts, merging: ToMeConfig | None) -> Iterator[_Mix]:
    counts = _counts(facts)
    runs = {numbers: _runs(facts, *numbers) for numbers in counts}
    skipping = {numbers: skipping_error_of(facts, own) for numbers, own in runs.items()}
    tried = _with_corrections(facts) if merging is None else [(merging, [merging.correction.every])]
    for merging_settings, distances in tried:
        costs = costs_of(facts, merging_settings)
        for every in distances:
            full_counts = {full for full, _ in counts}
            merged = {full: _merging_error(facts, merging_settings, every, full) for full in full_counts}
            for full, finest in counts:
                speedup = costs.speedup(runs[full, finest], every)
                expected_error = skipping[full, finest] + merged[full]
                yield _Mix(merging_settings, every, full, finest, speedup, expected_error)


def merging_pays(facts: RunFacts) -> bool:
    """Return whether any token grid has so many tokens that merging saves enough time, in some way."""
    return _has_grid(facts, fewest_that_merge(facts))


def fewest_that_merge(facts: RunFacts) -> int:
    """Return the fewest tokens of a grid that merges with some scope and some ratio."""
    every = (facts.min_tokens(scope, ratio) for scope, ratio in _ways(facts))
    return min(every, default=policy.fewest_tokens(facts.model))


def _has_grid(facts: RunFacts, tokens: int) -> bool:
    """Return whether a token grid that can merge has so many tokens."""
    return any(facts.tokens(level) >= tokens for level in facts.work.levels if level <= _DEEPEST)


def _with_corrections(facts: RunFacts) -> Iterator[tuple[ToMeConfig, Sequence[int]]]:
    """Yield the settings of token merging to try, each with the distances of corrections to try."""
    corrects = _expected_errors(facts).corrected is not None and facts.follows_steps
    for merging in _mergings(facts):
        yield merging, _CORRECTIONS if corrects and merging.merges else (0,)


def _mergings(facts: RunFacts) -> Iterator[ToMeConfig]:
    """Yield the settings of token merging to try but for corrections, of which the first merge nothing."""
    deepest = min(_DEEPEST, max(facts.work.levels, default=1))
    yield ToMeConfig(ratio=0.0, max_downsample=deepest)
    residuals = facts.model == "transformer" and facts.follows_steps
    for scope, ratio in _ways(facts):
        min_tokens = facts.min_tokens(scope, ratio)
        if not _has_grid(facts, min_tokens):
            continue
        config = ToMeConfig(
            ratio=ratio,
            max_downsample=deepest,
            min_tokens=min_tokens,
            sx=_width_of_cells(scope, ratio),
            scope=scope,
            planner="tiled",
            features="model_residual" if residuals else "input",
            proportional=facts.proportional,
            merge_sharing=MergeSharing(blocks=facts.follows_steps),
        )
        yield falling(config) if residuals and scope == "block" else config


def _width_of_cells(scope: str, ratio: float) -> int:
    """Return the width of a destination's cell that suits a scope and a ratio, in tokens."""
    if scope == "block":
        return width_of_cells(ratio)
    return 4 if ratio > _CROWDED else 2


def _ways(facts: RunFacts) -> Iterator[tuple[str, float]]:
    """Yield the scopes and ratios of token merging to try."""
    for scope in scopes_of(facts):
        for ratio in _RATIOS[scope]:
            yield scope, ratio


def scopes_of(facts: RunFacts) -> list[str]:
    """Return the scopes of token merging that the default method tries."""
    if facts.model == "transformer" and facts.whole_blocks and facts.follows_steps:
        return ["block"]  # a stack of blocks merges once, and is corrected once
    scopes = []
    if facts.layers:
        scopes.append("layers")
    if facts.whole_blocks and facts.model != "unet":
        scopes.append("block")
    return scopes


def _counts(facts: RunFacts) -> Sequence[tuple[int, int]]:
    """Return the numbers of full steps, and of steps that run the finest level, to try."""
    steps = facts.steps
    parts = facts.work.parts
    if not (facts.follows_steps and facts.can_skip and parts & {"deep", "blocks"}) or steps <= _FEWEST:
        return [(steps, steps)]
    stride = math.ceil((steps - _FEWEST) / _MOST_COUNTS)
    counts = [*range(_FEWEST, steps, stride), steps]
    finest = counts if "finest" in parts else [steps]
    return [(full, with_finest) for with_finest in finest for full in counts if full <= with_finest]


@functools.lru_cache(maxsize=4096)
def _of_runs(facts: RunFacts, part: str, runs: tuple[int, ...]) -> float:
    """Return the expected error of skipping a part in all steps but these."""
    reaches = reaches_of(runs, facts.steps, facts.schedule.ends_clean)
    times = policy.MADE_GOOD if facts.makes_good else 1.0
    return times * _expected_errors(facts).of_skipping(part, reaches, facts.steps)


def _even(steps: int, full: int, finest: int) -> StepReuse:
    return StepReuse(every=distance(steps, full), shallow_every=distance(steps, finest))


def _runs(facts: RunFacts, full: int, finest: int) -> StepsOfReuse:
    """Return which steps are full, and which run the finest level, given the number of each."""
    steps = facts.steps
    spacing = _expected_errors(facts).spacing
    runs = _even(steps, full, finest).steps_of(steps)
    if facts.schedule.ends_clean and full < finest == steps:
        return runs._replace(full=without_the_last(steps, full, policy.TAIL_OF_A_CLEAN_END))
    if full < steps and spacing < 1:
        return runs._replace(full=nearest(later_ones(steps, full, spacing), runs.finest))
    return runs


def later_ones(steps: int, count: int, spacing: float) -> tuple[int, ...]:
    """Return ``count`` ≥ 3 steps: the first two, the last, and others that lie closer towards the end.

    Places are powers with the exponent ``spacing``, 0 < spacing ≤ 1, which is 1 for equal distances.

    >>> later_ones(20, 6, 1.0), later_ones(20, 6, 0.6)
    ((0, 1, 5, 10, 15, 19), (0, 1, 9, 13, 16, 19))
    """
    after = count - 2
    return 0, 1, *_distinct([1 + round((steps - 2) * (i / after) ** spacing) for i in range(1, after + 1)], 2)


def without_the_last(steps: int, count: int, tail: float) -> tuple[int, ...]:
    """Return ``count`` ≥ 3 steps at equal distances, from the first one to one before the last.

    ``tail`` is the time that is left after the last of them, as a share of a distance.

    >>> without_the_last(20, 8, 0.6), without_the_last(4, 3, 0.6)
    ((0, 2, 5, 7, 10, 12, 15, 17), (0, 1, 2))
    """
    distances = count - 1
    end = steps - 1 - max(1, round(tail * (steps - 1) / distances))
    return 0, *_distinct([round(end * i / distances) for i in range(1, count)], 1)


def nearest(places: Sequence[int], among: Sequence[int]) -> tuple[int, ...]:
    """Return the steps ``among`` ascending ones that are nearest to ``places``, a different one for each.

    >>> nearest((0, 1, 6, 9), (0, 1, 4, 5, 9))
    (0, 1, 5, 9)
    """
    chosen = []
    for place in places:
        right = min(bisect.bisect_left(among, place), len(among) - 1)
        left = max(0, right - 1)
        chosen.append(left if place - among[left] <= among[right] - place else right)
    return tuple(among[i] for i in _distinct(chosen, 0))


def _distinct(numbers: list[int], first: int) -> list[int]:
    """Make ascending numbers distinct and at least ``first``, keeping the last one where there is room."""
    for i in reversed(range(len(numbers) - 1)):
        numbers[i] = min(numbers[i], numbers[i + 1] - 1)
    return [max(number, first + i) for i, number in enumerate(numbers)]


def reaches_of(runs: Sequence[int], steps: int, ends_clean: bool = False) -> list[float]:
    """Return how far each skipped step is from the last two that ran a part.

    A linear forecast errs by the second derivative times half the product of the two distances. These are
    distances in a generation of 20 steps. A last step with almost no noise before it is left out.

    >>> reaches_of((0, 1, 4), 5)
    [16.0, 48.0]
    """
    reaches = []
    before = 0  # the last step but one that ran the part
    last = 0  # the last step that ran it
    ran = set(runs)
    skippable = steps - 1 if ends_clean else steps
    for step in range(skippable):
        if step in ran:
            before = last
            last = step
        else:
            reaches.append((step - last) * (step - before) / 2 * (_REFERENCE / steps) ** 2)
    return reaches


def distance(steps: int, full: int) -> float:
    """Return the shortest decimal number for ``reuse.every`` that gives this number of full steps.

    >>> distance(20, 20), distance(20, 8), distance(20, 9)
    (1, 3.0, 2.5)
    """
    if full >= steps:
        return 1
    exact = (steps - 2) / (full - 2)
    for digits in range(1, 9):
        every = int(exact * 10**digits + _ROUNDING_OF_DIGITS) / 10**digits
        if int((steps - 2) / every + QUOTIENT_ROUNDING) == full - 2:
            return every
    return exact


def _places(chosen: Sequence[int], steps: int) -> tuple[float, ...]:
    """Return the places of some steps, from 0 for the first step of all to 1 for the last one."""
    return tuple(step / (steps - 1) for step in chosen)


def _settings(facts: RunFacts, mix: _Mix) -> ToMeConfig:
    steps = facts.steps
    merging = dataclasses.replace(mix.merging, correction=Correction(every=mix.every))
    if mix.full == steps:
        return merging
    reuse = _even(steps, mix.full, mix.finest)
    full, finest = _runs(facts, mix.full, mix.finest)
    if full != reuse.steps_of(steps).full:
        others = sorted(set(finest) - set(full)) if "finest" in facts.work.parts else []
        reuse = dataclasses.replace(
            reuse, full_steps=_places(full, steps), shallow_steps=_places(others, steps)
        )
    return dataclasses.replace(merging, reuse=reuse)
