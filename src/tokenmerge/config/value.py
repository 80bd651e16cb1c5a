"""What all settings classes share: a short ``repr``."""

from __future__ import annotations

import dataclasses


class Value:
    """A frozen dataclass with a default for each field; its ``repr`` shows the fields that were changed."""

    __slots__ = ()

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        plain = type(self)()
        values = {field.name: getattr(self, field.name) for field in fields}
        changed = [f"{name}={value!r}" for name, value in values.items() if value != getattr(plain, name)]
        return f"{type(self).__name__}({', '.join(changed)})"
