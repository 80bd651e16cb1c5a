"""Former names of settings, which records from before November 2026 have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Current names by former names.
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
