"""How merging changes over the denoising steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from tokenmerge.config.checks import as_items, as_number, check_fields, number, refuse, share
from tokenmerge.config.removed import refuse_removed
from tokenmerge.config.settings import check_changes
from tokenmerge.config.value import Value

_start = number("a share of the steps, from 0 to below 1", lambda value: 0 <= value < 1)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Schedule(Value):
    """How merging changes over the denoising steps: its ratio, its start and end, and any other setting.

    Early steps decide the structure of a picture, and merging harms them little; late steps draw its detail.

    Args:
        ratio: factors for the config's ``ratio``, ≥ 0. Numbers are spaced evenly over the steps, and linearly
            interpolated between them. Raising the factors does what raising the ratio does. ``(1.4, 0.6)``
            merges more at first: the picture is closer to the dense one than with a constant ratio of the
            same mean, and attention saves a little less. Rising factors give a less close picture.
        start: share of the steps before merging starts, 0 ≤ start < until; the steps before it are dense.
            Raising it gives up the saving of the early steps, which merging harms least.
        until: share of the steps after which merging ends, start < until ≤ 1; the steps after it are dense.
            Lowering it gives up the saving of the late steps, and with it most of the loss.
        phases: settings that hold from a share of the steps on: ``{0.5: {"planner": "tome"}}``. Any field of
            :class:`tokenmerge.config.MergeSettings` can change. Spend time where it pays most: a slow and
            close setting late, a fast one early.

    Of T steps, those with round(start · T) ≤ i < round(until · T) merge, and only they reuse anything. All
    shares are of the denoising steps that run, whatever their timesteps or sigmas. Image-to-image with a
    strength of 0.5 runs half of the steps, so they are shares of that half.

    Raises:
        ConfigError: a value is outside these ranges.

    >>> Schedule(ratio=(1.4, 0.6), until=0.8)
    Schedule(ratio=(1.4, 0.6), until=0.8)
    """

    ratio: tuple[float, ...] = (1.0,)
    start: float = 0.0
    until: float = 1.0
    phases: Mapping[float, Mapping[str, Any]] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        checks = {"ratio": _check_factors, "start": _start, "until": share, "phases": _check_phases}
        check_fields(self, "schedule.", checks)
        if self.start >= self.until:
            refuse("schedule.start", f"less than schedule.until={self.until:g}", self.start)

    @property
    def changes_ratio(self) -> bool:
        """Whether the ratio is multiplied by anything but 1."""
        return self.ratio != (1.0,)

    def factor(self, index: int, steps: int) -> float:
        """What the ratio is multiplied by at step ``index`` of ``steps``; 0 where nothing merges.

        >>> [Schedule(ratio=(1.0, 0.0), until=0.75).factor(i, 5) for i in range(5)]
        [1.0, 0.75, 0.5, 0.25, 0.0]
        """
        if not self.merges(index, steps):
            return 0.0
        place = index / max(1, steps - 1) * (len(self.ratio) - 1)
        before = min(int(place), max(0, len(self.ratio) - 2))
        after = min(before + 1, len(self.ratio) - 1)
        return self.ratio[before] + (self.ratio[after] - self.ratio[before]) * (place - before)

    def merges(self, index: int, steps: int) -> bool:
        """Whether step ``index`` of ``steps`` merges, by ``start`` and ``until``.

        >>> [i for i in range(10) if Schedule(start=0.2, until=0.8).merges(i, 10)]
        [2, 3, 4, 5, 6, 7]
        """
        return round(self.start * steps) <= index < round(self.until * steps)

    @property
    def highest_factor(self) -> float:
        """The largest factor of any step."""
        return max(self.ratio)

    def phase(self, index: int, steps: int) -> int:
        """How many of the phases have begun at step ``index`` of ``steps``."""
        return sum(index >= round(start * steps) for start in self.phases)

    def changes(self) -> Iterator[dict[str, Any]]:
        """Settings that differ from the config's own: none at the beginning, then those of each phase.

        A phase keeps the changes of the phases before it.
        """
        changed: dict[str, Any] = {}
        yield changed
        for own in self.phases.values():
            changed = {**changed, **own}
            yield changed


def _check_factors(name: str, value: Any) -> tuple[float, ...]:
    if callable(value):
        refuse_removed(name, "a function as the factor", "take numbers, such as (1.4, 0.6)")
    items = as_items(value)
    factors = [as_number(item) for item in items or ()]
    plain = tuple(factor for factor in factors if factor is not None and factor >= 0)
    if not plain or len(plain) < len(factors):
        refuse(name, "factors ≥ 0, such as (1.4, 0.6)", value)
    return plain


def _check_phases(name: str, value: Any) -> dict[float, dict[str, Any]]:
    return check_changes(name, "share of the steps", share, value)
