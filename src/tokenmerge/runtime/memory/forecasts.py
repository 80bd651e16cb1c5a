"""How wrong forecasts of step reuse are, measured in steps that run the part and so know the truth."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmerge.runtime.memory.context import ThreadState
from tokenmerge.runtime.memory.reuse import Residual, extrapolated
from tokenmerge.runtime.memory.run_log import ForecastError


def note_forecast(thread: ThreadState, part: str, before: Residual | None, now: Residual) -> None:
    """Compare what a part has added with the forecast from earlier steps. Nothing waits for the device.

    The part is ``"deep"`` for blocks and deep stages, ``"finest"`` for the finest level of a UNet. ``before``
    is the residual from which the forecast is made.
    """
    context, memory = thread.context, thread.memory
    known = context.decision.forecasts.get(part)
    if known is None or before is None or before.delta is None or torch.compiler.is_compiling():
        return
    truth, first = now.latest[0], before.latest[0]
    if truth is None or first is None or truth.shape != first.shape or memory.log is None:
        return
    distance, gap = known
    forecast = extrapolated(before, [0.0] * len(before.latest), torch.tensor(distance))
    forecast = forecast if isinstance(forecast, Tensor) else forecast[0]
    scale, copies = memory.log.guidance, context.guidance_copies
    lengths = [
        torch.linalg.vector_norm(_guided(tensor, scale, copies).flatten(1), dim=1, dtype=torch.float32)
        for tensor in (forecast - truth, truth)
    ]
    error = lengths[0] / lengths[1].clamp(min=torch.finfo(torch.float32).tiny)
    memory.log.errors.append(ForecastError(memory.tracker.done, part, gap, error))


def _guided(tensor: Tensor, scale: float | None, copies: int) -> Tensor:
    """Return a tensor as classifier-free guidance combines it, if its batch holds both parts."""
    if copies < 2 or scale is None:
        return tensor
    unguided, guided, *_ = tensor.chunk(copies)
    return unguided + scale * (guided - unguided)
