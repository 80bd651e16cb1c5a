"""How wrong forecasts of step reuse are, measured in steps that run the part and so know the truth.

What a forecast misses of a part's change, it is taken to miss of the change of the model's output. What that
changes in the picture that the model predicts follows from the noise level. So errors of all parts and models
have one unit: that of the latents, in which pictures have a standard deviation of about 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenmerge.runtime.memory.context import ThreadState
from tokenmerge.runtime.memory.reuse import Residual
from tokenmerge.runtime.memory.run_log import ForecastError, RunLog

_TINY = torch.finfo(torch.float32).tiny


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
    assert before.agreement is not None
    delta, agreement = before.delta[0], before.agreement[0]
    assert delta is not None
    assert agreement is not None
    change = truth - first
    error = torch.addcmul(change, delta, agreement * known[0], value=-1)  # as `extrapolated` forecasts it
    scale, copies = memory.log.guidance, context.guidance_copies
    error, change = (_length(_guided(own, scale, copies)) for own in (error, change))
    memory.log.missed.append((part, known[1], error / change.clamp(min=_TINY)))


def note_output(log: RunLog, thread: ThreadState, result: Any) -> None:
    """Compare the model's result with those of earlier steps. Nothing waits for the device."""
    missed, log.missed = log.missed, []
    sample, log.sample = log.sample, None
    output = result if isinstance(result, Tensor) else result[0]
    if sample is None or not isinstance(output, Tensor) or sample.ndim != output.ndim:
        return  # such as a sample of token ids
    decision, tracker = thread.context.decision, thread.memory.tracker
    if log.noise.kept is not None and decision.deep is not None and decision.finest is not None:
        return  # a step that skips all parts
    copies = thread.context.guidance_copies
    sample, output = sample.detach().chunk(copies)[0], _guided(output.detach(), log.guidance, copies)
    for axis, size in enumerate(output.shape):  # some models get more than the sample, or return more
        sample = sample.narrow(axis, 0, min(size, sample.shape[axis]))
        output = output.narrow(axis, 0, sample.shape[axis])
    weight = 1.0 if log.levels is None else log.levels.weight(tracker.index)
    if log.levels is not None and log.noise.kept is None and tracker.call == 0:
        log.noise.note(log.levels, sample, log.levels.picture(sample, output, tracker.index), tracker.index)
    for part, gap, error in missed:
        before = log.outputs.get((tracker.call, part))
        if before is not None and before.shape == output.shape:
            change = _length(output - before) * (weight / output[0].numel() ** 0.5)
            log.errors.append(ForecastError(tracker.done, part, gap, error * change))
    for part, skipped in (("deep", decision.deep), ("finest", decision.finest)):
        if skipped is None:
            log.outputs[tracker.call, part] = output
    if tracker.is_last:
        log.forget_outputs(tracker.call)


def _length(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor.flatten(1), dim=1, dtype=torch.float32)


def _guided(tensor: Tensor, scale: float | None, copies: int) -> Tensor:
    """Return a tensor as classifier-free guidance combines it, if its batch holds both parts."""
    if copies < 2 or scale is None:
        return tensor
    unguided, guided, *_ = tensor.chunk(copies)
    return torch.lerp(unguided, guided, scale)
