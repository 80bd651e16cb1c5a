"""What settings classes share: checks of single settings, a short ``repr``, and copies with other fields.

A check takes the name and the value of a setting, and returns a plain value. It also accepts values of
similar types, such as a NumPy integer, and returns Python's own type, so that settings compare, print and
save alike. For any other value it raises :class:`tokenmerge.ConfigError`.
"""

from __future__ import annotations

import contextlib
import copy
import math
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any, NoReturn, TypeVar

from tokenmerge.errors import ConfigError, short_repr

Check = Callable[[str, Any], Any]
V = TypeVar("V", bound="Value")

_MOST = 2**63 - 1  # the largest integer of 64 bits
MOST_STEPS = 5_000  # of a generation; plans for more would take too long to make


class Value:
    """A frozen dataclass with a default for each field; its ``repr`` shows the fields that were changed."""

    __slots__ = ()

    def __repr__(self) -> str:
        plain = vars(type(self)())
        changed = [f"{name}={value!r}" for name, value in vars(self).items() if value != plain[name]]
        return f"{type(self).__name__}({', '.join(changed)})"


def unchecked(value: V, **fields: Any) -> V:
    """Copy a value with other fields that were checked before; ``dataclasses.replace`` checks again."""
    made = copy.copy(value)
    for name, field_value in fields.items():
        object.__setattr__(made, name, field_value)
    return made


def refuse(name: str, wanted: str, value: object) -> NoReturn:
    """Raise the error that says what a setting takes and what it was given."""
    raise ConfigError(f"{name}: expected {wanted}, got {short_repr(value)}")


def check_fields(settings: object, prefix: str, checks: Mapping[str, Check]) -> None:
    """Check the fields of a frozen dataclass, named ``prefix`` + field, and put plain values in place."""
    for name, check in checks.items():
        object.__setattr__(settings, name, check(f"{prefix}{name}", getattr(settings, name)))


def check_counts(**counts: Any) -> None:
    """Check arguments that are integers ≥ 1, or None; there are at most ``MOST_STEPS`` ``steps``."""
    for name, value in counts.items():
        optional(integer(1, MOST_STEPS if name == "steps" else _MOST))(name, value)


def integer(lowest: int | None = None, highest: int = _MOST) -> Check:
    """Accept a whole number from ``lowest`` to ``highest``, which fits into 64 bits."""
    wanted = "an integer" if lowest is None else f"an integer ≥ {lowest}"
    if highest < _MOST:
        wanted = f"{wanted} and ≤ {highest:,}"

    def check(name: str, value: Any) -> int:
        whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if not whole or (lowest is not None and value < lowest) or highest < value <= _MOST:
            refuse(name, wanted, value)
        if abs(int(value)) > _MOST:
            refuse(name, f"{wanted} that fits into 64 bits", value)
        return int(value)

    return check


def number(wanted: str, accepts: Callable[[float], bool]) -> Check:
    """Accept a finite real number for which ``accepts`` is true; ``wanted`` describes such numbers."""

    def check(name: str, value: Any) -> float:
        plain = as_number(value)
        if plain is None or not accepts(plain):
            refuse(name, wanted, value)
        return plain

    return check


at_least_1 = number("a number ≥ 1, such as 2.0", lambda value: value >= 1)


def one_of(choices: Sequence[Any]) -> Check:
    """Accept one of ``choices``, which are all words or all integers."""
    kind = numbers.Integral if isinstance(choices[0], int) else str
    wanted = f"one of {', '.join(map(repr, choices))}"

    def check(name: str, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, kind) or value not in choices:
            refuse(name, wanted, value)
        return choices[choices.index(value)]

    return check


def of_type(accepted: type, wanted: str) -> Check:
    """Accept a value of a type, which ``wanted`` describes."""

    def check(name: str, value: Any) -> Any:
        if not isinstance(value, accepted):
            refuse(name, wanted, value)
        return value

    return check


switch = of_type(bool, "True or False")
text = of_type(str, "a string")


def optional(check: Check) -> Check:
    """Accept None as well."""
    return lambda name, value: None if value is None else check(name, value)


def as_number(value: object) -> float | None:
    """Return a finite real number as a float, or None for anything else, and if it is too large."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    with contextlib.suppress(OverflowError, TypeError, ValueError):
        plain = float(value)
        return plain if math.isfinite(plain) else None
    return None


def as_items(value: object) -> tuple[Any, ...] | None:
    """Return the items of something ordered, such as a list or a NumPy array, or None for anything else."""
    if isinstance(value, (str, bytes, Mapping, Set)) or not isinstance(value, Collection):
        return None
    with contextlib.suppress(TypeError):
        return tuple(value)
    return None
