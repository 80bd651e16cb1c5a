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
        context, skippable = state.model.context, state.threads.value.cache.skippable
        call, decision = (context.call, 0), context.decision
        distance = decision.finest if state.is_finest else decision.deep
        before = skippable.get(call)
        if distance is not None and before is not None:
            if state.is_last:
                return extrapolated(before, [0.0], distance)[0]
            return tree_map(torch.zeros_like, before)  # read by modules that are skipped too
        result = original.of(self)(*args, **kwargs)
        if state.is_last:
            state.model.threads.value.ran.add("finest" if state.is_finest else "deep")
            added = result.clone()  # hosts change results in place
            note_forecast(state.model.threads.value, "finest" if state.is_finest else "deep", before, added)
            skippable[call] = updated(before, (added,))
        elif before is None:
            skippable[call] = tree_map(lambda tensor: tensor.new_zeros(()).expand(tensor.shape), result)
        return result

    return forward


def note_forecast(thread: ThreadState, part: str, before: Residual | None, truth: Tensor) -> None:
    """Note what a forecast would have missed of what a part has added."""
    log, context = thread.memory.log, thread.context
    if log is not None and not torch.compiler.is_compiling():
        log.observe(log.note_forecast, context.decision, context.guidance_copies, part, before, truth)
