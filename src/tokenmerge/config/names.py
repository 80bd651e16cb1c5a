"""Settings by name: ``"reuse.every"`` for the field ``every`` of the part ``reuse``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from tokenmerge.config.parts import PARTS
from tokenmerge.errors import ConfigError, shown

# What took the place of removed settings. docs/tried-and-removed.md says why they were removed.
REPLACED: Mapping[str, str] = {
    **dict.fromkeys(("levels", "schedule", "phases", "until"), "rules"),
    **dict.fromkeys(("blend", "clusters", "by_guidance"), "reuse.every"),
    **dict.fromkeys(("reuse.ends", "reuse.spacing", "reuse.start", "reuse.span"), "reuse.full_steps"),
    **dict.fromkeys(("reuse.shallow_from", "reuse.shallow_until"), "reuse.shallow_steps"),
    "correction.steps": "correction.every",
    "repeat_penalty": "features",
    "use_rand": "seed",
}


def check_known(names: Iterable[object], known: Iterable[str]) -> None:
    """Check that names are those of settings.

    Raises:
        ConfigError: some are not.
    """
    known = list(known)
    unknown = [str(name) for name in names if name not in known]
    if not unknown:
        return
    got = ", ".join(map(shown, unknown))
    instead = {name: REPLACED.get(name) or REPLACED.get(name.partition(".")[0]) for name in unknown}
    hints = "".join(f"; take {new} instead of {name}" for name, new in instead.items() if new is not None)
    raise ConfigError(f"expected settings out of {', '.join(known)}, got {got}{hints}")


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted name.

    Args:
        settings: by dotted name, or nested. A nested part is an object, which gives all its fields, or a
            mapping, which gives some of them.

    Raises:
        ConfigError: one setting is given twice.

    >>> flat({"ratio": 0.4, "correction": {"every": 2}})
    {'ratio': 0.4, 'correction.every': 2}
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        for dotted, own in _spread(name, value).items():
            if dotted in found:
                raise ConfigError(f"{dotted}: given twice, by its name and in {name}; pass it once")
            found[dotted] = own
    return found


def _spread(name: str, value: Any) -> dict[str, Any]:
    part = PARTS.get(name)
    if part is not None and isinstance(value, part):
        return {f"{name}.{field.name}": getattr(value, field.name) for field in dataclasses.fields(part)}
    if part is not None and isinstance(value, Mapping):
        return {f"{name}.{field}": own for field, own in value.items()}
    return {name: value}


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
