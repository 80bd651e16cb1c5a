"""Places of denoising steps in a generation of any length: 0 is the first step, 1 the last."""

from __future__ import annotations

from typing import Any

from tokenmerge.config.checks import as_items, as_number, refuse


def check_places(name: str, value: Any) -> tuple[float, ...]:
    """Accept places in rising order; there may be none."""
    items = as_items(value)
    places = [as_number(item) for item in items or ()]
    plain = tuple(place for place in places if place is not None and 0 <= place <= 1)
    if items is None or len(plain) < len(places) or list(plain) != sorted(set(plain)):
        refuse(
            name, "places from 0 (the first step) to 1 (the last) in rising order, such as (0, 0.5, 1)", value
        )
    return plain


def at_places(places: tuple[float, ...], steps: int) -> tuple[int, ...]:
    """Return the indices of the steps at these places of a generation.

    >>> at_places((0, 0.5, 1), 20)
    (0, 10, 19)
    """
    return tuple(sorted({round(place * (steps - 1)) for place in places}))
