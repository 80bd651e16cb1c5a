"""Settings by level and step in files of earlier versions, which had three forms of them.

``levels`` and ``schedule`` (``ratio``, ``start``, ``until`` and ``phases``) are read as rules, and
``use_rand=False`` is read as ``seed=None``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tokenmerge.config.checks import as_items, as_number, refuse
from tokenmerge.config.removed import refuse_removed
from tokenmerge.config.rules import dense_outside

_PIECES = 10  # a ratio that changed from step to step is read as this many constant ratios
_SCHEDULE = ("ratio", "start", "until", "phases")
_RATIOS = ("ratio", "reference_ratio")


def with_rules(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of any version with rules in place of the earlier forms.

    Args:
        settings: by name, nested or dotted.

    Raises:
        ConfigError: an earlier form has another shape, or a setting that was removed.

    >>> with_rules({"ratio": 0.4, "levels": {"2": {"ratio": 0.2}}, "until": 0.7, "use_rand": False})["rules"]
    [{'level': 2, 'ratio': 0.2}, {'start': 0.7, 'ratio': 0.0, 'reference_ratio': None, 'reuse.every': 1}]
    """
    given = _without_use_rand(settings)
    schedule = given.pop("schedule", None)
    old = {} if schedule is None else schedule if isinstance(schedule, Mapping) else {"ratio": schedule}
    old = {f"schedule.{name}": value for name, value in old.items()}
    old |= {f"schedule.{name}": given.pop(name) for name in ("until", "phases") if name in given}
    if given.pop("by_guidance", None):
        refuse_removed(
            "by_guidance", "what changes with guidance", "write apply_token_merging(pipe, speedup=2.0)"
        )
    names = (*(f"schedule.{name}" for name in _SCHEDULE), "levels")
    old |= {name: given.pop(name) for name in names if name in given}
    if not old:
        return given
    phases = _by_key("schedule.phases", "start", old.pop("schedule.phases", {}))
    levels = _by_key("levels", "level", old.pop("levels", {}))
    factors = _factors(old.pop("schedule.ratio", (1.0,)))
    start, until = old.pop("schedule.start", 0.0), old.pop("schedule.until", 1.0)
    rules = [*phases, *levels]
    if factors != (1.0,):
        # What the config has itself changes over the steps too.
        rules = [{name: given.get(name, 0.5) for name in _RATIOS if name in (*given, "ratio")}, *rules]
        rules = [piece for rule in rules for piece in _pieces(rule, factors)]
    rules += [rule.to_dict() for rule in dense_outside(start, until)]
    return {**given, **old, "rules": [*given.get("rules", ()), *rules]}


def _without_use_rand(settings: Mapping[str, Any]) -> dict[str, Any]:
    given = dict(settings)
    if given.pop("use_rand", True) is False:
        given["seed"] = None
    return given


def _by_key(name: str, condition: str, value: Any) -> list[dict[str, Any]]:
    """Return rules from settings by the values of a condition, which JSON may have turned into text."""
    if not isinstance(value, Mapping) or not all(isinstance(own, Mapping) for own in value.values()):
        refuse(name, f"{{{condition}: {{setting: value}}}}", value)
    rules = []
    for key, own in value.items():
        try:
            plain = (int if condition == "level" else float)(key) if isinstance(key, str) else key
        except ValueError:
            refuse(name, f"a number as the {condition}", key)
        rules.append({condition: plain, **_without_use_rand(own)})
    return sorted(rules, key=lambda rule: as_number(rule[condition]) or 0)


def _factors(value: Any) -> tuple[float, ...]:
    if callable(value):
        refuse_removed("schedule.ratio", "a function as the factor", "write rules with a ratio each")
    items = as_items(value)
    factors = [as_number(item) for item in items or ()]
    plain = tuple(factor for factor in factors if factor is not None and factor >= 0)
    if not plain or len(plain) < len(factors):
        refuse("schedule.ratio", "factors ≥ 0, such as (1.4, 0.6)", value)
    return plain


def _pieces(rule: Mapping[str, Any], factors: tuple[float, ...]) -> Iterator[dict[str, Any]]:
    """Yield a rule as pieces of the generation, in each of which its ratios have the factor of the middle."""
    ratios = {name: own for name in _RATIOS if (own := as_number(rule.get(name))) is not None}
    if not ratios:
        yield dict(rule)
        return
    for piece in range(_PIECES):
        start, until = max(rule.get("start", 0.0), piece / _PIECES), (piece + 1) / _PIECES
        if start < until:
            place = (piece + 0.5) / _PIECES * (len(factors) - 1)
            before = min(int(place), max(0, len(factors) - 2))
            after = min(before + 1, len(factors) - 1)
            factor = factors[before] + (factors[after] - factors[before]) * (place - before)
            scaled = {name: round(ratio * factor, 4) for name, ratio in ratios.items()}
            yield {**rule, "start": start, "until": until, **scaled}
