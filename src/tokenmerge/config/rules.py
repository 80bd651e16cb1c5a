"""Rules: settings that change by level or by denoising step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tokenmerge.config.checks import (
    Check,
    Value,
    check_fields,
    integer,
    number,
    optional,
    refuse,
    share,
    unchecked,
)
from tokenmerge.config.parts import check_distance, flat
from tokenmerge.config.settings import CHECKS as MERGE_CHECKS
from tokenmerge.errors import ConfigError

_CONDITIONS: Mapping[str, Check] = {
    "level": optional(integer(1)),
    "start": number("a share of the steps, from 0 to below 1", lambda value: 0 <= value < 1),
    "until": share,
}
REUSE_EVERY = "reuse.every"


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Rule(Value):
    """Settings that hold under conditions, in place of the config's own.

    A :class:`tokenmerge.ToMeConfig` takes rules as mappings, which have the conditions and the changed
    settings by name: ``{"level": 2, "ratio": 0.25}``.

    Args:
        level: the resolution level where the rule holds. None: every level. Merging less at deep levels
            brings the picture closer for little time; merging less at level 1 gives up most of the saving.
        start: share of the denoising steps from which on it holds, 0 ≤ start < until.
        until: share of the steps up to which it holds, start < until ≤ 1. Of T steps, the rule holds in those
            with round(start · T) ≤ i < round(until · T). All shares are of the steps that run: image-to-image
            with a strength of 0.5 runs half of them, so they are shares of that half.
        changes: the changed settings by name. Every field of :class:`tokenmerge.config.MergeSettings` can
            change. A rule for some steps and all levels can set ``reuse.every`` to 1: these steps skip
            nothing.

    Raises:
        ConfigError: a value is outside its range, or a setting cannot change under these conditions.
    """

    level: int | None = None
    start: float = 0.0
    until: float = 1.0
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_fields(self, "", _CONDITIONS)
        if self.start >= self.until:
            refuse("start", f"less than until={self.until:g}", self.start)
        changes = flat(self.changes)
        checks = MERGE_CHECKS
        if self.of_steps and self.level is None:
            checks = {**checks, REUSE_EVERY: _check_full}
        if fixed := [str(name) for name in changes if name not in checks]:
            raise ConfigError(
                f"cannot change {', '.join(fixed)}; what can be changed under these conditions is "
                f"{', '.join(checks)}"
            )
        plain = {name: checks[name](name, value) for name, value in changes.items()}
        object.__setattr__(self, "changes", plain)

    @classmethod
    def of(cls, given: Any) -> Rule:
        """Return a rule from a mapping of its conditions and changes; a rule stays as it is."""
        if isinstance(given, Rule):
            return given
        if not isinstance(given, Mapping):
            refuse("rule", 'conditions and settings by name, such as {"level": 2, "ratio": 0.25}', given)
        conditions = {name: given[name] for name in _CONDITIONS if name in given}
        changes = {name: value for name, value in given.items() if name not in _CONDITIONS}
        return cls(**conditions, changes=changes)

    @property
    def of_steps(self) -> bool:
        """Whether the rule holds in some steps only."""
        return (self.start, self.until) != (0, 1)

    @property
    def conditions(self) -> dict[str, Any]:
        """The conditions by name, without those that always hold."""
        always = {"level": None, "start": 0, "until": 1}
        return {name: own for name, no in always.items() if (own := getattr(self, name)) != no}

    def to_dict(self) -> dict[str, Any]:
        """Return the conditions and changes by name, as :meth:`of` reads them."""
        return {**self.conditions, **self.changes}

    def __repr__(self) -> str:
        return repr(self.to_dict())

    def at_step(self, index: int, steps: int) -> Rule | None:
        """Return the rule for one step, without that condition; None if it does not hold."""
        holds = round(self.start * steps) <= index < round(self.until * steps)
        return unchecked(self, start=0.0, until=1.0) if holds else None

    def at_level(self, level: int) -> Rule | None:
        """Return the rule for one level, without that condition; None if it does not hold."""
        return unchecked(self, level=None) if self.level in (None, level) else None

    def at_share(self, done: float) -> Rule | None:
        """Return the same for the step before which a share of the steps is done."""
        return unchecked(self, start=0.0, until=1.0) if self.start <= done < self.until else None


Rules = tuple[Rule, ...]


def check_rules(name: str, value: Any) -> Rules:
    """Accept rules in their order; there may be none."""
    if not isinstance(value, list | tuple):
        refuse(name, 'a list of rules, such as [{"level": 2, "ratio": 0.25}]', value)
    rules = []
    for place, given in enumerate(value):
        try:
            rules.append(Rule.of(given))
        except ConfigError as error:
            raise ConfigError(f"{name}[{place}]: {error}") from error
    return tuple(rules)


def resolved(rules: Rules, decide: Callable[[Rule], Rule | None]) -> tuple[dict[str, Any], Rules]:
    """Apply rules whose conditions are known.

    Args:
        rules: in their order; later ones win.
        decide: returns a rule without the conditions that hold; None if one does not hold.

    Returns:
        The settings that change, and the rules whose other conditions are not known yet.
    """
    changes: dict[str, Any] = {}
    left: list[Rule] = []
    for rule in filter(None, map(decide, rules)):
        if rule.conditions:
            left.append(rule)
            continue
        changes |= rule.changes
        left = [
            unchecked(one, changes={name: own for name, own in one.changes.items() if name not in changes})
            for one in left
        ]
    return changes, tuple(rule for rule in left if rule.changes)


def dense_outside(start: float, until: float) -> Rules:
    """Return rules that make the steps before and after a part of a generation dense.

    Args:
        start: share of the steps before the part, 0 ≤ start < until.
        until: share of the steps before its end, start < until ≤ 1.

    Raises:
        ConfigError: a share is out of its range.
    """
    Rule(start=start, until=until)  # checks the shares
    dense = {"ratio": 0, "reference_ratio": None, REUSE_EVERY: 1}
    before = (Rule(until=start, changes=dense),) if start > 0 else ()
    return (*before, Rule(start=until, changes=dense)) if until < 1 else before


def _check_full(name: str, value: Any) -> float:
    plain = check_distance(name, value)
    if plain != 1:
        refuse(name, "1 in a rule for some of the steps, which then skip nothing", value)
    return plain
