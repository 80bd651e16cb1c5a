"""Settings by name: ``"reuse.every"`` for the field ``every`` of the part ``reuse``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tokenmerge.config.correction import Correction
from tokenmerge.config.old_names import NEW_NAMES
from tokenmerge.config.plan_sharing import PlanSharing
from tokenmerge.config.removed import without_removed
from tokenmerge.config.schedule import Schedule
from tokenmerge.config.step_reuse import StepReuse
from tokenmerge.errors import ConfigError

# The classes that a ToMeConfig nests, by the name of their field.
PARTS: Mapping[str, type] = {
    "schedule": Schedule,
    "plans": PlanSharing,
    "correction": Correction,
    "reuse": StepReuse,
}


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted name.

    Args:
        settings: by dotted name, by a former name, or nested. A nested part is an object, which gives all its
            fields, or a mapping, which gives some of them.

    Raises:
        ConfigError: one setting is given twice, under two names, or it was removed.

    >>> flat({"ratio": 0.4, "correction": Correction(every=2), "share_plan": True})
    {'ratio': 0.4, 'correction.every': 2, 'plans.blocks': True}
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        for dotted, own in _spread(name, value).items():
            if dotted in found:
                raise ConfigError(f"{dotted}: given twice, under two names; pass it once")
            found[dotted] = own
    return without_removed(found)


def _spread(name: str, value: Any) -> dict[str, Any]:
    part = PARTS.get(name)
    if part is not None and isinstance(value, part):
        return {f"{name}.{field.name}": getattr(value, field.name) for field in dataclasses.fields(part)}
    if part is not None and isinstance(value, Mapping):
        return {f"{name}.{field}": own for field, own in value.items()}
    if name == "schedule" and value is None:  # former spelling of a constant ratio
        value = (1.0,)
    return {NEW_NAMES.get(name, name): value}


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a ToMeConfig from settings by dotted name, all of them known.

    Raises:
        ConfigError: a value of a part is out of range.

    >>> nested({"ratio": 0.4, "correction.every": 2})
    {'ratio': 0.4, 'correction': Correction(every=2)}
    """
    arguments: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        part, dot, field = name.partition(".")
        if dot:
            parts.setdefault(part, {})[field] = value
        else:
            arguments[name] = value
    return {**arguments, **{name: PARTS[name](**fields) for name, fields in parts.items()}}
