"""Stages of a UNet that are skipped on some steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from tokenmerge.runtime.blocks.host_method import HostMethod
from tokenmerge.runtime.memory.forecasts import note_forecast
from tokenmerge.runtime.memory.reuse import extrapolated, residual_of, updated
from tokenmerge.runtime.memory.state import STATE, StageState


def stage_call(original: HostMethod) -> Callable:
    """Make the method of a stage: on some steps, its extrapolated result takes its place."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: StageState | None = self.__dict__.get(STATE)
        if state is None or not state.model.context.decision.caches:
            return original.of(self)(*args, **kwargs)
        context, cache = state.model.context, state.threads.value.cache
        call = context.call, 0
        distance = context.decision.finest if state.is_finest else context.decision.deep
        before, placeholder = cache.residuals.get(call), cache.placeholders.get(call)
        if distance is not None and before is not None:
            return extrapolated(before, [0.0], distance)
        if distance is not None and placeholder is not None:
            return tree_map(torch.zeros_like, placeholder)  # read by modules that are skipped too
        result = original.of(self)(*args, **kwargs)
        if state.is_last:
            residual = residual_of(result, [0.0])
            part = "finest" if state.is_finest else "deep"
            note_forecast(state.model.threads.value, part, before, residual)
            cache.residuals[call] = updated(before, residual)
        elif call not in cache.placeholders:
            cache.placeholders[call] = tree_map(
                lambda tensor: tensor.new_zeros(()).expand(tensor.shape), result
            )
        return result

    return forward
