"""Checkpoints that a kill at any moment cannot spoil."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def save(state: dict[str, Any], path: Path) -> None:
    """Write beside the old checkpoint, then replace it in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.replace(path)


def load(path: Path, device: torch.device) -> dict[str, Any] | None:
    """Return the last complete checkpoint, or None where there is none yet."""
    return torch.load(path, map_location=device, weights_only=True) if path.exists() else None
