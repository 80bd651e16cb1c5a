"""Refuses to change models while another thread generates with them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection
from typing import Any

from torch import nn

from tokenmerge.errors import ModelInUseError
from tokenmerge.runtime.steps.pipeline import is_pipeline


def refuse_in_use(models: Collection[nn.Module]) -> None:
    """Refuse to change models that other threads run.

    It looks at the call stacks of these threads, so that a cancelled generation never counts. Between two
    steps, a pipeline of diffusers is seen to use a model, and a loop of another kind is not.

    Raises:
        ModelInUseError: a call of one of the models runs, or a pipeline that has it.
    """
    own = threading.get_ident()
    for thread, innermost in sys._current_frames().items():
        frame = None if thread == own else innermost
        while frame is not None:
            owner = frame.f_locals.get("self") if frame.f_code.co_varnames[:1] == ("self",) else None
            if used := next((model for model in models if _uses(owner, model)), None):
                raise ModelInUseError(
                    f"a generation with this {type(used).__name__} runs in another thread, and its settings "
                    "would change under it; wait until it has ended, with a lock around applying and "
                    "generating, or give each thread a copy of the model that shares its weights"
                )
            frame = frame.f_back


def _uses(owner: Any, model: nn.Module) -> bool:
    """Return whether an object is a model, or a pipeline that has it, alone or in a list."""
    if owner is model or not is_pipeline(owner):
        return owner is model
    values = vars(owner).values()
    parts = [part for value in values for part in (value if isinstance(value, list | tuple) else [value])]
    return any(part is model or getattr(part, "_orig_mod", None) is model for part in parts)
