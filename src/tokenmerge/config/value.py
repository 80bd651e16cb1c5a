"""What all settings classes share: a short ``repr``, and copies with other fields."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, TypeVar

V = TypeVar("V", bound="Value")


class Value:
    """A frozen dataclass with a default for each field; its ``repr`` shows the fields that were changed."""

    __slots__ = ()

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        plain = type(self)()
        values = {field.name: getattr(self, field.name) for field in fields}
        changed = [f"{name}={value!r}" for name, value in values.items() if value != getattr(plain, name)]
        return f"{type(self).__name__}({', '.join(changed)})"


def unchecked(value: V, **fields: Any) -> V:
    """Copy a value with other fields that were checked before; ``dataclasses.replace`` checks again."""
    made = copy.copy(value)
    for name, own in fields.items():
        object.__setattr__(made, name, own)
    return made
