"""Stages of a UNet that are skipped on some steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tokenmerge.models.call import HostMethod
from tokenmerge.runtime.memory.caches import Residual, extrapolated, updated
from tokenmerge.runtime.memory.state import STATE, StageState, ThreadState


def stage_call(original: HostMethod) -> Callable:
    """Make the method of a stage: on some steps, its extrapolated result takes its place."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: StageState | None = self.__dict__.get(STATE)
        if state is None or not state.model.context.decision.caches:
            return original.of(self)(*args, **kwargs)
        context = state.model.context
        thread = state.model.threads.value
        skippable = state.threads.value.cache.skippable
        call = (context.call, 0)
        part = "finest" if state.is_finest else "deep"
        distance = context.decision.finest if state.is_finest else context.decision.deep
        before = skippable.get(call)
        residual = before if isinstance(before, Residual) else None
        if distance is not None and before is not None:
            if residual is not None:
                return extrapolated(residual, [0.0], distance)[0]
            return tree_map(torch.zeros_like, before)  # read by modules that are skipped too
        result = original.of(self)(*args, **kwargs)
        if state.is_last:
            thread.ran.add(part)
            added = result.clone()  # hosts change results in place
            note_forecast(thread, part, residual, added)
            skippable[call] = updated(residual, (added,))
        elif before is None:
            skippable[call] = tree_map(lambda tensor: tensor.new_zeros(()).expand(tensor.shape), result)
        return result

    return forward


def note_forecast(thread: ThreadState, part: str, before: Residual | None, truth: Tensor) -> None:
    """Note what a forecast would have missed of what a part has added."""
    log = thread.memory.log
    context = thread.context
    if log is not None and not torch.compiler.is_compiling():
        log.observe(log.note_forecast, context.decision, context.guidance_copies, part, before, truth)
