"""A file of ``tokenmerge tune`` for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenmerge.config import EstimateErrors, FoundFor, OffAtSpeed, Tuned

ERRORS = EstimateErrors(
    prompts=6,
    off=(OffAtSpeed(1.5, before=4.0, after=3.0), OffAtSpeed(3.0, before=2.0, after=1.0)),
    spread_before=3.0,
    spread_after=1.0,
    freedom=8,
)


def tuned(speedup: float = 1.5, steps: int = 20, **changes: Any) -> Tuned:
    """Return what was measured on a UNet with latents of 16 × 16, with other fields of ``FoundFor``."""
    return Tuned(speedup, FoundFor("UNet2DConditionModel", 16, 16, steps, **changes), ERRORS)


def tuned_file(folder: Path, content: Tuned) -> Path:
    """Write the file."""
    path = folder / "tuned.json"
    path.write_text(json.dumps(content.content()))
    return path
