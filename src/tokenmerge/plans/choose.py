"""The default method: the least harmful mix of merging and step reuse that reaches a wanted speed-up."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tokenmerge.config import Correction, PlanSharing, StepReuse, ToMeConfig
from tokenmerge.plans.cost import correction_bytes, costs_of
from tokenmerge.plans.facts import Facts
from tokenmerge.plans.places import later_ones, nearest, without_the_last
from tokenmerge.plans.policy import (
    Harms,
    Power,
    fewest_tokens,
    harms_of,
    is_strong,
    most_correction_bytes,
    tail_of_a_clean_end,
)

# The ratios of token merging that are tried, of which the lowest is timed, and the distances of corrections.
_RATIOS = tuple(i / 40 for i in range(8, 31))
_CORRECTIONS = (0, 2, 3, 4, 6, 8, 12)
# Above this ratio, cells are twice as wide: with fewer destinations, more sources are left to choose from.
_CROWDED = 0.5
# At most so many numbers of complete steps are tried, spread over all.
_MOST_COUNTS = 32
# The first two steps and the last are complete.
_FEWEST = 3
_REFERENCE = 20  # steps of the generations that reaches are compared with
# A speed-up is reached where two decimals show it. Ten of 20 steps of a transformer give 1.997×, since its
# first and its last layer always run: nine would give 2.22×, and twice the expected error.
ROUNDING = 0.005


@dataclasses.dataclass(frozen=True)
class Plan:
    """One mix of token merging and step reuse.

    Attributes:
        config: its settings.
        speedup: dense operations over those with these settings, for the whole generation.
        harm: the expected squared error to the dense picture, whose range is 0 to 1. It serves to compare
            plans of one generation.
    """

    config: ToMeConfig
    speedup: float
    harm: float


def highest_speedup(facts: Facts) -> float:
    """Return the highest speed-up that any mix reaches in a generation."""
    return max(plan.speedup for plan in plans_of(facts))


@functools.lru_cache(maxsize=128)
def plan_for(facts: Facts, speedup: float) -> Plan:
    """Return the least harmful plan whose counted operations reach a speed-up, or the fastest one.

    Its settings are explicit: they give the same pictures when they are applied by themselves. A higher
    speed-up never expects less harm. :func:`highest_speedup` says what can be reached.

    Args:
        facts: about the generation.
        speedup: dense operations over those with merging and step reuse, ≥ 1; 1: everything is dense.
    """
    plans = plans_of(facts)
    reaching = [plan for plan in plans if plan.speedup + ROUNDING >= speedup]
    if reaching:
        return min(reaching, key=lambda plan: (plan.harm, -plan.speedup))
    return max(plans, key=lambda plan: plan.speedup)


@functools.lru_cache(maxsize=16)
def plans_of(facts: Facts, merging: ToMeConfig | None = None) -> tuple[Plan, ...]:
    """Return the plans of all mixes that no other mix beats in both speed and harm, the slowest first.

    Args:
        facts: about the generation.
        merging: settings of token merging, which all these plans have; None: any.
    """
    best: list[_Mix] = []
    for mix in sorted(_mixes(facts, merging), key=lambda mix: (-mix.speedup, mix.harm)):
        if not best or mix.harm < best[-1].harm:
            best.append(mix)
    return tuple(Plan(_settings(facts, mix), mix.speedup, mix.harm) for mix in reversed(best))


class _Mix(NamedTuple):
    """Settings of token merging, numbers of steps, and what they give, as in a :class:`Plan`."""

    merging: ToMeConfig
    complete: int
    finest: int
    speedup: float
    harm: float


def harm_of(facts: Facts, config: ToMeConfig) -> float:
    """Return the expected squared error of a generation with these settings, as in a :class:`Plan`."""
    harms, steps, runs = _harms(facts), facts.steps, config.reuse.steps_of(facts.steps)
    skipped = _of_runs(steps, runs.full, harms.skip.get(_inner(facts)))
    skipped += _of_runs(steps, runs.shallow, harms.skip.get("finest"))
    return skipped + merging_harm_of(facts, config)


def merging_harm_of(facts: Facts, config: ToMeConfig) -> float:
    """Return the part of :func:`harm_of` that token merging has."""
    steps = facts.steps
    every = _between_corrections(config, steps, len(config.reuse.steps_of(steps).full))
    merged = _harms(facts).of_merging(config.scope, config.ratio, every, config.proportional)
    return merged * sum(config.at_step(step, steps).merges for step in range(steps)) / steps


def _between_corrections(config: ToMeConfig, steps: int, complete: int) -> float:
    """Return the number of steps from one correction to the next, or to the end; 0: there is none."""
    return min(config.correction.every, complete) * steps / complete


def _harms(facts: Facts) -> Harms:
    return harms_of(facts.model, is_strong(facts.guidance))


def _inner(facts: Facts) -> str:
    return "deep" if "deep" in facts.work.parts else "blocks"


def _mixes(facts: Facts, merging: ToMeConfig | None) -> Iterator[_Mix]:
    harms, inner, counts = _harms(facts), _inner(facts), _counts(facts)
    skipped = {
        own: sum(
            _of_runs(facts.steps, runs, harms.skip.get(part))
            for runs, part in zip(_runs(facts, *own), (inner, "finest"), strict=True)
        )
        for own in counts
    }
    mergings = _mergings(facts, harms.corrected is not None) if merging is None else [merging]
    for merging in mergings:
        costs = costs_of(facts, merging)
        every = merging.correction.every
        merged = {
            complete: harms.of_merging(
                merging.scope,
                merging.ratio,
                _between_corrections(merging, facts.steps, complete),
                merging.proportional,
            )
            for complete in {complete for complete, _ in counts}
        }
        for complete, finest in counts:
            dense = -(-complete // every) if every else 0
            harm = skipped[complete, finest] + merged[complete]
            yield _Mix(merging, complete, finest, costs.speedup(complete, finest, dense), harm)


def _mergings(facts: Facts, corrects: bool) -> Iterator[ToMeConfig]:
    """Yield the settings of token merging to try, of which the first merge nothing."""
    deepest = min(8, max(facts.work.levels, default=1))
    yield ToMeConfig(ratio=0.0, max_downsample=deepest)
    fewest = max(facts.fewest_tokens, fewest_tokens())
    if all(facts.tokens(level) < fewest for level in facts.work.levels if level <= deepest):
        return
    scopes = ["layers"] * facts.layers + ["block"] * (facts.whole_blocks and facts.model != "unet")
    residuals = facts.model == "transformer" and facts.follows_steps
    corrects = corrects and facts.follows_steps
    corrections = {
        scope: _CORRECTIONS
        if corrects and correction_bytes(facts, scope) <= most_correction_bytes()
        else (0,)
        for scope in scopes
    }
    own = ((scope, every) for scope in scopes for every in corrections[scope])
    for (scope, every), ratio in itertools.product(own, _RATIOS):
        yield ToMeConfig(
            ratio=ratio,
            max_downsample=deepest,
            min_tokens=fewest,
            sx=4 if ratio > _CROWDED else 2,
            scope=scope,
            planner="tiled",
            features="model_residual" if residuals else "input",
            proportional=facts.proportional,
            plans=PlanSharing(blocks=facts.follows_steps),
            correction=Correction(every=every),
        )


def _counts(facts: Facts) -> Sequence[tuple[int, int]]:
    """Return the numbers of complete steps and of steps with the finest level to try."""
    steps, parts = facts.steps, facts.work.parts
    if not (facts.follows_steps and facts.can_skip and parts & {"deep", "blocks"}) or steps <= _FEWEST:
        return [(steps, steps)]
    stride = -(-(steps - _FEWEST) // _MOST_COUNTS)
    counts = [*range(_FEWEST, steps, stride), steps]
    finest = counts if "finest" in parts else [steps]
    return [(complete, own) for own in finest for complete in counts if complete <= own]


@functools.lru_cache(maxsize=4096)
def _of_runs(steps: int, runs: tuple[int, ...], harm: Power | None) -> float:
    """Return the harm of skipping a part in all steps but these; None: the model has no such part."""
    return 0.0 if harm is None else sum(map(harm.at, reaches_of(runs, steps))) / steps


def _runs(facts: Facts, complete: int, finest: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return which steps are complete and which run the finest level, of these numbers of steps."""
    steps, spacing = facts.steps, _harms(facts).spacing
    full, shallow = _even(steps, complete, finest).steps_of(steps)
    if complete == steps:
        return full, shallow
    if facts.ends_clean and finest == steps:
        return without_the_last(steps, complete, tail_of_a_clean_end()), shallow
    if spacing < 1:
        return nearest(later_ones(steps, complete, spacing), shallow), shallow
    return full, shallow


def _even(steps: int, complete: int, finest: int) -> StepReuse:
    return StepReuse(every=distance(steps, complete), shallow_every=distance(steps, finest))


def reaches_of(runs: Sequence[int], steps: int) -> list[float]:
    """Return how far each skipped step is from the last two that ran a part.

    A linear forecast errs by the second derivative times half the product of the two distances. These are
    distances in a generation of 20 steps.

    >>> reaches_of((0, 1, 4), 5)
    [16.0, 48.0]
    """
    reaches, before, last = [], 0, 0
    for step in range(steps):
        if step in runs:
            before, last = last, step
        else:
            reaches.append((step - last) * (step - before) / 2 * (_REFERENCE / steps) ** 2)
    return reaches


def distance(steps: int, complete: int) -> float:
    """Return the shortest decimal number for ``reuse.every`` that gives this number of complete steps.

    >>> distance(20, 20), distance(20, 8), distance(20, 9)
    (1, 3.0, 2.5)
    """
    if complete >= steps:
        return 1
    exact = (steps - 2) / (complete - 2)
    for digits in range(1, 9):
        every = int(exact * 10**digits + 1e-6) / 10**digits
        if int((steps - 2) / every + 1e-9) == complete - 2:
            return every
    return exact


def _settings(facts: Facts, mix: _Mix) -> ToMeConfig:
    steps = facts.steps
    if mix.complete == steps:
        return mix.merging
    reuse = _even(steps, mix.complete, mix.finest)
    full, shallow = _runs(facts, mix.complete, mix.finest)
    if full != reuse.steps_of(steps).full:
        others = sorted({*shallow} - {*full}) if "finest" in facts.work.parts else []
        places = [tuple(step / (steps - 1) for step in own) for own in (full, others)]
        reuse = dataclasses.replace(reuse, full_steps=places[0], shallow_steps=places[1])
    return dataclasses.replace(mix.merging, reuse=reuse)
