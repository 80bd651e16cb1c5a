"""Settings do not change under a generation that runs in another thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection
from typing import Any

from torch import nn

from tokenmerge.errors import ModelInUseError
from tokenmerge.runtime.steps.pipeline import has_scheduler, owners


def refuse_in_use(models: Collection[nn.Module]) -> None:
    """Refuse to change models that other threads run.

    It looks at the call stacks of these threads, so that a cancelled generation never counts. Between two
    steps, a model is seen in use in a pipeline of diffusers, and not in a loop of another kind.

    Raises:
        ModelInUseError: a call of one of the models runs, or a pipeline that has it.
    """
    own = threading.get_ident()
    for thread, frame in sys._current_frames().items():
        if thread == own:
            continue
        for owner in owners(frame):
            if used := next((model for model in models if _uses(owner, model)), None):
                raise ModelInUseError(
                    f"a generation with this {type(used).__name__} runs in another thread, and its settings "
                    "would change under it; wait until it has ended, with a lock around applying and "
                    "generating, or give each thread a copy of the model that shares its weights"
                )


def _uses(owner: Any, model: nn.Module) -> bool:
    if owner is model:
        return True
    if not has_scheduler(owner):
        return False
    parts = [part for value in vars(owner).values() for part in (value if _is_list(value) else [value])]
    return any(part is model or getattr(part, "_orig_mod", None) is model for part in parts)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)
