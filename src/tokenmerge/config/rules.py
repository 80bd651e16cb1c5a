"""Rules: settings that hold at a level or in some steps, in place of the config's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tokenmerge.config.checks import Check, Value, check_fields, integer, number, optional, refuse
from tokenmerge.config.parts import check_full, flat
from tokenmerge.config.settings import CHECKS
from tokenmerge.errors import ConfigError

_CONDITIONS: Mapping[str, Check] = {
    "level": optional(integer(1)),
    "start": number("a share of the steps, from 0 to below 1", lambda value: 0 <= value < 1),
    "until": number("a share of the steps, above 0 and up to 1", lambda value: 0 < value <= 1),
}
REUSE_EVERY = "reuse.every"
_MOST_RULES = 100  # each may begin a phase, and each phase is checked


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Rule(Value):
    """Settings that hold under conditions, in place of the config's own.

    A :class:`tokenmerge.ToMeConfig` takes rules as mappings, which have the conditions and the changed
    settings by name: ``{"level": 2, "ratio": 0.25}``.

    Args:
        level: the resolution level where the rule holds, or None for every level. Merging less at deep levels
            brings the image closer for little time; merging less at level 1 gives up most of the saving.
        start: share of the denoising steps from which on it holds, 0 ≤ start < until.
        until: share of the steps up to which it holds, start < until ≤ 1. Of T steps, the rule holds in those
            with round(start · T) ≤ i < round(until · T). All shares are of the steps that run: image-to-image
            with a strength of 0.5 runs half of them, so they are shares of that half.
        changes: the changed settings by name. Every field of :class:`tokenmerge.config.MergeSettings` can
            change. A rule for some steps and all levels can set ``reuse.every`` to 1, which skips nothing.

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
        checks = CHECKS
        if self.of_steps and self.level is None:
            checks = {**checks, REUSE_EVERY: check_full}
        fixed = [str(name) for name in changes if name not in checks]
        if fixed:
            raise ConfigError(
                f"cannot change {', '.join(fixed)}; what can be changed under these conditions is "
                f"{', '.join(checks)}"
            )
        object.__setattr__(
            self, "changes", {name: checks[name](name, value) for name, value in changes.items()}
        )

    @classmethod
    def of(cls, given: Any) -> Rule:
        """Return a rule from a mapping of its conditions and changes, or the rule itself if it is one."""
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

    def to_dict(self) -> dict[str, Any]:
        """Return the conditions that do not always hold, and the changes, as :meth:`of` reads them."""
        given: dict[str, Any] = {}
        if self.level is not None:
            given["level"] = self.level
        if self.start != 0:
            given["start"] = self.start
        if self.until != 1:
            given["until"] = self.until
        return {**given, **self.changes}

    def __repr__(self) -> str:
        return repr(self.to_dict())


Rules = tuple[Rule, ...]


def check_rules(name: str, value: Any) -> Rules:
    """Return the rules in a list of rules or of mappings, or raise an error that names the wrong one."""
    if not isinstance(value, list | tuple):
        refuse(name, 'a list of rules, such as [{"level": 2, "ratio": 0.25}]', value)
    if len(value) > _MOST_RULES:
        raise ConfigError(f"{name}: expected at most {_MOST_RULES} rules, got {len(value):,}")
    rules = []
    for place, given in enumerate(value):
        try:
            rules.append(Rule.of(given))
        except ConfigError as error:
            raise ConfigError(f"{name}[{place}]: {error}") from error
    return tuple(rules)


def dense_outside(start: float, until: float) -> Rules:
    """Return rules that make a generation dense outside of a part, given by shares of the steps."""
    Rule(start=start, until=until)  # raises an error if a share is out of its range
    dense = {"ratio": 0, "reference_ratio": None, REUSE_EVERY: 1}
    rules = []
    if start > 0:
        rules.append(Rule(until=start, changes=dense))
    if until < 1:
        rules.append(Rule(start=until, changes=dense))
    return tuple(rules)
