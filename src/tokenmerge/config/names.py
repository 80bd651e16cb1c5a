"""Settings by name: ``"reuse.every"`` for the field ``every`` of the part ``reuse``; and former names."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from tokenmerge.config.parts import PARTS
from tokenmerge.config.removed import without_removed
from tokenmerge.errors import ConfigError

# Current names by former names, which old records and old command lines still use.
NEW_NAMES: Mapping[str, str] = {
    "plan_every": "plans.every",
    "share_plan": "plans.blocks",
    "share_guidance": "plans.guidance",
    "correct_every": "correction.every",
    "reuse_every": "reuse.every",
    "reuse_finest_every": "reuse.shallow_every",
    "reuse_finest_from": "reuse.shallow_from",
    "reuse_span": "reuse.span",
}
_OLD_WORD = re.compile(rf"(?<![\w.])({'|'.join(NEW_NAMES)})(?![\w.])")


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted name.

    Args:
        settings: by dotted name, by a former name, or nested. A nested part is an object, which gives all its
            fields, or a mapping, which gives some of them.

    Raises:
        ConfigError: one setting is given twice, under two names, or it was removed.

    >>> flat({"ratio": 0.4, "correction": {"every": 2}, "share_plan": True})
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
    return {NEW_NAMES.get(name, name): value}


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a ToMeConfig from settings by dotted name, all of them known.

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


def with_new_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a recorded variant under their current names.

    The label of another variant, which is recorded under ``"as"``, is rewritten too.

    >>> with_new_names({"ratio": 0.5, "reuse_every": 2})
    {'ratio': 0.5, 'reuse.every': 2}
    """
    return {
        NEW_NAMES.get(name, name): words_with_new_names(value)
        if name == "as" and isinstance(value, str)
        else value
        for name, value in settings.items()
    }


def words_with_new_names(label: str) -> str:
    """Return the label of a variant, with the current names.

    >>> words_with_new_names("tome ratio=0.5 share_plan")
    'tome ratio=0.5 plans.blocks'
    """
    return _OLD_WORD.sub(lambda found: NEW_NAMES[found[0]], label)
