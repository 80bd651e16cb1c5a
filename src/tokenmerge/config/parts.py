"""The parts of a ToMeConfig (how plans are shared, correction, step reuse), and the names of its settings.

A setting of a part has a dotted name: ``"reuse.every"`` is the field ``every`` of the part ``reuse``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from tokenmerge.config.checks import (
    MOST_STEPS,
    Value,
    as_items,
    as_number,
    check_fields,
    integer,
    number,
    refuse,
    switch,
)
from tokenmerge.config.former import current_name
from tokenmerge.errors import ConfigError, nearest_of, short_repr

_EXACT = 2**53  # floats represent every integer up to here
QUOTIENT_ROUNDING = 1e-9  # keeps a quotient that is a whole number from being rounded down to the one below


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class MergeSharing(Value):
    """How long a merge plan is used, and which blocks and prompts share it.

    A merge plan says which tokens merge with which. Making one takes time, so using it more than once saves
    time. But a plan that was made for other tokens fits a little worse.

    Args:
        every: a plan is used for this many denoising steps, ≥ 1. Raising it makes planning cheaper and the
            image a little less close. With 1, each step has its own plans.
        blocks: blocks with the same token grid use the plan of the first of them. A UNet's way down and way
            up have a plan each. The cost of planning is divided by the number of blocks that share a plan;
            the image gets a little less close. With ``scope="block"``, tokens then merge before the first
            block and are unmerged after the last one: the same image in much less time.
        guidance: the samples that classifier-free guidance compares, one with the prompt and one without, use
            one plan. Guidance amplifies the difference between the two; with two plans, it would amplify the
            difference between the plans as well. It costs no time and pays most under strong guidance. If the
            samples are in one batch, the plan is made from their mean similarity. Of the residuals of
            ``features``, it compares what guidance makes of them. If the samples are in two calls, the second
            call uses the plan of the first, except with gradients and in a model compiled as a whole, where
            each call makes its own plan. Switched off, each plan fits its own sample better.

    Raises:
        ConfigError: a value is outside these ranges.
    """

    every: int = 1
    blocks: bool = False
    guidance: bool = True

    def __post_init__(self) -> None:
        check_fields(self, "merge_sharing.", {"every": integer(1), "blocks": switch, "guidance": switch})


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Correction(Value):
    """Steps that merge nothing and measure what merging loses, so that the other steps can add it back.

    On such a correction step, each layer or block that merges stores its residual: what it adds to each
    token. On the steps in between, the tokens of a group share one residual. Each token then gets back the
    difference, on the correction step, between its own residual and that of its group.

    It needs memory for one residual of each layer or block that merges. It cannot be used with
    ``scope="keys"``, where each token has its own residual anyway.

    Args:
        every: distance between correction steps, counted in full steps, ≥ 2, or 0 if there are none.
            Raising it saves more time, as more steps merge, and gives back less of what merging loses.
            3 gives back most of the loss and costs a third of the saving.

    Raises:
        ConfigError: the value is outside its range.
    """

    every: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "correction.", {"every": integer(0)})
        if self.every == 1:
            raise ConfigError("correction.every: with 1 no step would merge; take 2 or more, or 0 for none")

    @property
    def on(self) -> bool:
        """Whether there are correction steps."""
        return self.every > 0


def _check_distance(name: str, value: Any) -> float:
    """Accept a number ≥ 1, as an integer if it is one."""
    plain = number("a number ≥ 1", lambda value: value >= 1)(name, value)
    return int(plain) if plain.is_integer() and plain < _EXACT else plain


def check_full(name: str, value: Any) -> float:
    """Accept the distance between full steps with which no step skips anything: 1."""
    plain = _check_distance(name, value)
    if plain != 1:
        refuse(name, "1 in a rule for some of the steps, which then skip nothing", value)
    return plain


def _check_places(name: str, value: Any) -> tuple[float, ...]:
    items = as_items(value)
    if items is not None and len(items) > MOST_STEPS:
        raise ConfigError(f"{name}: expected at most {MOST_STEPS:,} places, got {len(items):,}")
    places = [as_number(item) for item in items or ()]
    plain = tuple(place for place in places if place is not None and 0 <= place <= 1)
    if items is None or len(plain) < len(places) or list(plain) != sorted(set(plain)):
        refuse(
            name, "places from 0 (the first step) to 1 (the last) in rising order, such as (0, 0.5, 1)", value
        )
    return plain


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class StepReuse(Value):
    """Step reuse: on some denoising steps a part of the model is skipped and its cached output is reused.

    In a UNet, the deep stages are skipped: everything below its finest level (as in DeepCache, arXiv
    2312.00858). In other models, the blocks that can run on merged tokens as a whole are skipped. A skipped
    output is linearly extrapolated from the last two steps that computed it (arXiv 2503.06923, order 1). The
    extrapolation is damped if the output did not keep changing in the same direction. The cache holds two
    outputs of each skipped part. In pipelines of diffusers without classifier-free guidance, and with
    ``FlowMatchEulerDiscreteScheduler``, the next full step makes good what the extrapolations missed. For
    that, the outputs of the model in the last two full steps are cached, and of skipped steps since.

    A full step runs the whole model. The first two steps and the last one are full, and the others
    are evenly spaced between them. diffusers' own caches cannot run at the same time.

    Args:
        every: mean distance between full steps, ≥ 1; it may be a fraction. Raising it saves more, and the
            image follows the dense one less closely. With 1, no step skips anything.
        shallow_every: in a UNet, mean distance between the steps that run all of the finest level, 1 ≤
            shallow_every ≤ every. Full steps are chosen from them. The other steps skip that level too:
            only the first and the last convolution run. Raising it saves most in narrow models and large
            images, where that level takes most of the time. It loses more than raising ``every``, above all
            under strong guidance.
        full_steps: places of the full steps, 0 (the first step) to 1 (the last), in place of ``every``:
            ``(0, 0.05, 0.5, 0.8, 1)``. More places save less and bring the image closer. If there are none,
            ``every`` decides.
        shallow_steps: places of the steps that run all of the finest level, besides the full steps, in
            place of ``shallow_every``. It can only be given with ``full_steps``.

    Raises:
        ConfigError: a value is outside these ranges.

    >>> StepReuse(every=4).steps_of(20).full
    (0, 1, 5, 10, 15, 19)
    """

    every: float = 1
    shallow_every: float = 1
    full_steps: tuple[float, ...] = ()
    shallow_steps: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, "reuse.", dict.fromkeys(("every", "shallow_every"), _check_distance))
        check_fields(self, "reuse.", dict.fromkeys(("full_steps", "shallow_steps"), _check_places))
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

    def steps_of(self, steps: int) -> StepsOfReuse:
        """Return which steps of a generation of ``steps`` ≥ 1 steps run which part.

        >>> StepReuse(every=4, shallow_every=2).steps_of(8)
        StepsOfReuse(full=(0, 1, 7), finest=(0, 1, 3, 5, 7))
        >>> StepReuse(full_steps=(0, 0.5, 1)).steps_of(20).full
        (0, 10, 19)
        """
        if self.full_steps:
            full = {round(place * (steps - 1)) for place in self.full_steps}
            finest = full | {round(place * (steps - 1)) for place in self.shallow_steps}
            return StepsOfReuse(tuple(sorted(full)), tuple(sorted(finest)))
        run_finest = _evenly(tuple(range(steps)), steps, self.shallow_every)
        return StepsOfReuse(_evenly(run_finest, steps, self.every), run_finest)


class StepsOfReuse(NamedTuple):
    """Which steps of a generation run which part of the model, by their index."""

    full: tuple[int, ...]  # the full steps, which run the whole model
    finest: tuple[int, ...]  # those that run the finest level of a UNet: the full and the shallow steps


def _evenly(among: tuple[int, ...], steps: int, every: float) -> tuple[int, ...]:
    """Return the first two of some of the steps, and evenly spaced ones of the others, with the last."""
    others = among[2:]
    if every <= 1 or not others:
        return among
    count = min(len(others), max(1, int((steps - 2) / every + QUOTIENT_ROUNDING)))
    return (*among[:2], *(others[round(len(others) * j / count) - 1] for j in range(1, count + 1)))


# The classes that a ToMeConfig nests, by the name of their field.
PARTS: Mapping[str, type] = {
    "merge_sharing": MergeSharing,
    "correction": Correction,
    "reuse": StepReuse,
}

# What took the place of removed settings. docs/tried-and-removed.md says why they were removed.
REPLACED: Mapping[str, str] = {
    **dict.fromkeys(("levels", "schedule", "phases", "until"), "rules"),
    **dict.fromkeys(("blend", "clusters", "by_guidance"), "reuse.every"),
    **dict.fromkeys(("reuse.ends", "reuse.spacing", "reuse.start", "reuse.span"), "reuse.full_steps"),
    **dict.fromkeys(("reuse.shallow_from", "reuse.shallow_until"), "reuse.shallow_steps"),
    **{"correction.steps": "correction.every", "repeat_penalty": "features", "use_rand": "seed"},
}


def check_known(names: Iterable[object], known: Collection[str]) -> None:
    """Raise a ConfigError if names are not all those of settings."""
    unknown = [str(name) for name in names if name not in known]
    if not unknown:
        return
    got = ", ".join(map(short_repr, unknown))
    instead = {name: REPLACED.get(name) or REPLACED.get(name.partition(".")[0]) for name in unknown}
    hints = "".join(f"; take {new} instead of {name}" for name, new in instead.items() if new is not None)
    raise ConfigError(
        f"expected settings out of {', '.join(known)}, got {got}{hints or nearest_of(unknown[0], known)}"
    )


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted name.

    A nested part is an object, which gives all its fields, or a mapping, which gives some of them. Former
    names become the current ones, with a warning.

    Raises:
        ConfigError: a setting is given twice.

    >>> flat({"ratio": 0.4, "correction": {"every": 2}})
    {'ratio': 0.4, 'correction.every': 2}
    """
    found: dict[str, Any] = {}
    for given_name, value in settings.items():
        name = current_name(given_name)
        part = PARTS.get(name)
        fields = vars(value) if part and isinstance(value, part) else value
        nests = part is not None and isinstance(fields, Mapping)
        given = {name: value}
        if nests:
            given = {f"{name}.{field}": field_value for field, field_value in fields.items()}
        for dotted in given:
            if dotted in found:
                raise ConfigError(f"{dotted}: given twice, by its name and in {name}; pass it once")
        found |= given
    return found
