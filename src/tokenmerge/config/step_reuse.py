"""Step reuse: denoising steps that skip a part of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from tokenmerge.config.checks import Check, check_fields, number, one_of, optional, refuse, share
from tokenmerge.config.places import at_places, check_places
from tokenmerge.config.value import Value

_SPACING, _SPACING_WITH_NOISE = 0.8, 0.65
_TAIL = 0.6  # with free ends, the steps after the last full one, as a share of the mean distance
_EXACT = 2**53  # floats represent every integer up to here
_share_below_1 = number("a share of the steps, from 0 to below 1", lambda value: 0 <= value < 1)


def _check_distance(name: str, value: Any) -> float:
    plain = number("a number ≥ 1", lambda value: value >= 1)(name, value)
    return int(plain) if plain.is_integer() and plain < _EXACT else plain


# Checks of single fields.
CHECKS: Mapping[str, Check] = {
    "every": _check_distance,
    "ends": optional(one_of(("full", "free"))),
    "spacing": optional(number("a number above 0 and up to 1, or None", lambda value: 0 < value <= 1)),
    "start": _share_below_1,
    "shallow_every": _check_distance,
    "shallow_from": _share_below_1,
    "shallow_until": number("a share of the steps, from 0 to 1", lambda value: 0 <= value <= 1),
    "span": share,
    "full_steps": check_places,
    "shallow_steps": check_places,
}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class StepReuse(Value):
    """Step reuse: on some denoising steps a part of the model is skipped and its cached output is reused.

    In a UNet, the deep stages are skipped: everything below its finest level (as in DeepCache, arXiv
    2312.00858). In other models, the blocks that can run on merged tokens as a whole are skipped. A skipped
    output is linearly extrapolated from the last two steps that computed it (arXiv 2503.06923, order 1). The
    extrapolation is damped if the output did not keep changing in the same direction. The cache holds two
    outputs of each skipped part.

    ``every`` decides how many steps are full, and ``ends`` and ``spacing`` where they lie. The first step is
    always full. What is skipped before the second full step stays as it was, because it takes two to know how
    it changes.

    diffusers' own caches cannot run beside it.

    Args:
        every: mean distance between full steps, which run everything, ≥ 1; it may be a fraction. Raising it
            saves more, and the picture follows the dense one less closely. 1: no step reuses anything.
        ends: ``"full"``: the first two steps and the last one are full, since no step after the last one can
            repair it. ``"free"``: the second step can be skipped, and so can the last, or the last two or
            more if distances are long; the other full steps are closer together then. It changes neither the
            number of full steps nor the speed. None: ``"free"`` in flow matching if at most 2 % of the noise
            is left before the last step, as in Stable Diffusion 3. That step changes little then. Otherwise
            ``"full"``.
        spacing: 0 < spacing ≤ 1. 1: the same distance between all full steps, but for the first two with
            ``ends="full"``. Lower: long distances first, and shorter ones towards the end. It changes neither
            the number of full steps nor the speed. None: 1 with free ends; otherwise 0.65 for solvers that
            add noise in each step, since this noise undoes much of the loss of early steps, and 0.8 for
            the others.
        start: share of the steps, 0 ≤ start < 1, that are full before any step skips something. The later
            full steps stay where the settings above put them. Raising it gives up the saving of these steps
            and brings the picture closer, most of all under strong guidance.
        shallow_every: in a UNet, mean distance between the steps that run all of the finest level, 1 ≤
            shallow_every ≤ every. These are evenly spaced, and full steps are moved to the nearest of them.
            The other steps run only the last layer of that level. Raising it saves most in narrow models and
            large pictures, where that level takes most of the time. It loses more than raising ``every``,
            above all under strong guidance.
        shallow_from: share of the steps, 0 ≤ shallow_from < 1, that run all of the finest level before any
            step skips it. Raising it gives up the saving of these steps and brings the picture closer.
        shallow_until: share of the steps, 0 ≤ shallow_until ≤ 1, after which all steps run all of the finest
            level again. Lowering it gives up the saving of these steps and brings the picture closer, because
            the last steps draw its details. 1: they skip it like the others.
        span: highest mean distance between full steps, as a share of all steps, 0 < span ≤ 1, rounded down to
            whole steps; for the finest level, half of it. It limits the loss in short generations, whose
            steps differ more from each other. Raising it saves more there, and loses more.
        full_steps: places of the full steps, 0 (the first step) to 1 (the last), in place of ``every``,
            ``ends``, ``spacing``, ``start`` and ``span``: ``(0, 0.05, 0.5, 0.8, 1)``. More places save less
            and bring the picture closer. Empty: ``every`` decides.
        shallow_steps: places of the steps that run all of the finest level, besides the full steps, in place
            of the other settings of that level. It can only be given with ``full_steps``.

    Raises:
        ConfigError: a value is outside these ranges.

    >>> StepReuse(every=4, spacing=1).steps_of(20).full
    (0, 1, 5, 10, 15, 19)
    >>> StepReuse(every=4, spacing=0.6).steps_of(20).full
    (0, 1, 9, 13, 16, 19)
    >>> StepReuse(every=4, ends="free").steps_of(20).full
    (0, 3, 7, 10, 14, 17)
    >>> StepReuse(every=4, spacing=1, start=0.4).steps_of(20).full
    (0, 1, 2, 3, 4, 5, 6, 7, 10, 15, 19)
    """

    every: float = 1
    ends: str | None = None
    spacing: float | None = None
    start: float = 0.0
    shallow_every: float = 1
    shallow_from: float = 0.0
    shallow_until: float = 1.0
    span: float = 1.0
    full_steps: tuple[float, ...] = ()
    shallow_steps: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, "reuse.", CHECKS)
        if self.shallow_every > self.every and not self.full_steps:
            wanted = f"1 to reuse.every={self.every:g}, as a full step runs the finest level too"
            refuse("reuse.shallow_every", wanted, self.shallow_every)
        if self.shallow_steps and not self.full_steps:
            refuse("reuse.shallow_steps", "no places without reuse.full_steps", self.shallow_steps)

    @property
    def on(self) -> bool:
        """Whether any step may skip something."""
        return self.every > 1 or bool(self.full_steps)

    @property
    def given(self) -> str:
        """The setting that turns step reuse on, for messages: ``"reuse.every=2"``."""
        return f"reuse.full_steps={self.full_steps}" if self.full_steps else f"reuse.every={self.every:g}"

    @property
    def skips_finest(self) -> bool:
        """Whether any step may skip the finest level of a UNet."""
        return self.on and (self.shallow_every > 1 or bool(self.full_steps))

    def steps_of(self, steps: int, adds_noise: bool = False, ends_clean: bool = False) -> StepsOfReuse:
        """Which steps of a generation run which part.

        Args:
            steps: number of steps of the generation, ≥ 1.
            adds_noise: whether the solver adds noise in each step.
            ends_clean: whether almost no noise is left before the last step.

        >>> StepReuse(every=4, shallow_every=2, span=0.25).steps_of(8)
        StepsOfReuse(full=(0, 1, 3, 5, 7), shallow=(0, 1, 2, 3, 4, 5, 6, 7))
        """
        if self.full_steps:
            full = at_places(self.full_steps, steps)
            return StepsOfReuse(full, tuple(sorted({*full, *at_places(self.shallow_steps, steps)})))
        span, spacing = self.span * steps, self.spacing
        free = ends_clean if self.ends is None else self.ends == "free"
        if spacing is None:
            spacing = 1.0 if free else _SPACING_WITH_NOISE if adds_noise else _SPACING
        shallow = set(_spread(steps, min(self.shallow_every, int(span / 2)), 1.0))
        shallow.update(range(round(self.shallow_from * steps)))
        shallow.update(range(round(self.shallow_until * steps), steps))
        every = min(self.every, int(span))
        full = _spread_freely(steps, every, spacing) if free else _spread(steps, every, spacing)
        first = range(round(self.start * steps))
        full = tuple(sorted({*_nearest(full, sorted(shallow)), *first}))
        return StepsOfReuse(full, tuple(sorted(shallow.union(full))))


@dataclasses.dataclass(frozen=True)
class StepsOfReuse:
    """Which steps of a generation run which part of the model, by their index.

    Attributes:
        full: the steps that run everything.
        shallow: the steps that run the finest level of a UNet; all full steps are among them.
    """

    full: tuple[int, ...]
    shallow: tuple[int, ...]


def _spread(steps: int, every: float, spacing: float) -> tuple[int, ...]:
    """Return the first two steps, and after them one step in ``every``, ending with the last step.

    Place j of k lies at the share (j / k)^spacing of the way from the second step to the last.
    """
    between = steps - 2
    if every <= 1 or between < 1:
        return tuple(range(steps))
    count = max(1, int(between / every + 1e-9))
    return 0, 1, *_once([1 + round(between * (j / count) ** spacing) for j in range(1, count + 1)], first=2)


def _spread_freely(steps: int, every: float, spacing: float) -> tuple[int, ...]:
    """As many steps as :func:`_spread` has, of which only the first has its place.

    Place j of k, counted from 0, lies at the share (j / k)^spacing of the way from the first step to the last
    of them.
    """
    gaps = len(_spread(steps, every, 1.0)) - 1
    if gaps + 1 >= steps:
        return tuple(range(steps))
    end = steps - 1 - round(_TAIL * (steps - 1) / gaps)
    places = [round(end * (j / gaps) ** spacing) for j in range(1, gaps + 1)]
    return 0, *_once(places, first=1)


def _nearest(places: tuple[int, ...], among: list[int]) -> tuple[int, ...]:
    """Return the steps of ``among`` that are nearest to ``places``, one for each if there are enough."""
    if len(places) >= len(among):
        return tuple(among)
    nearest = [min(range(len(among)), key=lambda i: abs(among[i] - place)) for place in places]
    return tuple(among[i] for i in _once(nearest, first=0))


def _once(places: list[int], first: int) -> Iterator[int]:
    """Rising numbers from ``first`` on, moved so that none comes twice; the last stays."""
    for j in reversed(range(len(places) - 1)):
        places[j] = min(places[j], places[j + 1] - 1)
    return (max(place, first + j) for j, place in enumerate(places))
