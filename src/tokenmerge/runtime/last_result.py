"""What planners learn from the model's result in the last step: which tokens can be skipped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tokenmerge.runtime.caches import Memory
from tokenmerge.runtime.guidance import on_tokens
from tokenmerge.runtime.state import STATE, ModelState

# By how much each skip lowers the score of a token: exp(−0.1), as the authors of RAS have it.
_STARVATION = 0.1


def scores_of(memory: Memory, number: int) -> Tensor | None:
    """How well each token can be skipped, ``[b, n]``; None: no result is known.

    It is m_i · exp(−k · skips_i), with m_i the standard deviation of the last result over its channels, and k
    = 0.1 (RAS, arXiv 2502.10389).

    Args:
        memory: of the generation.
        number: of the call that plans.
    """
    deviation, skips = memory.deviations.get(number), memory.skips.get(number)
    if deviation is None or skips is None or skips.shape != deviation.shape:
        return deviation
    return deviation * torch.exp(-_STARVATION * skips)


def note_result(root: nn.Module, args: tuple, result: Any) -> None:
    """After the model's forward: note how its result varies, and which tokens its blocks did not compute."""
    state: ModelState = root.__dict__[STATE]
    context, thread = state.context, state.threads.value
    memory, plan = thread.memory, thread.plan
    made = result if isinstance(result, Tensor) else result[0]
    if memory is None or not isinstance(made, Tensor):
        return
    number, repeats = context.plan_call, context.call != context.plan_call
    over = made.detach().float().std(dim=2 if made.ndim == 3 else 1, keepdim=True)
    deviation = on_tokens(over, *thread.grid.shapes)
    if deviation is None:
        return
    before = memory.deviations.get(number)
    if repeats and before is not None and before.shape == deviation.shape:
        deviation = deviation + before  # guidance in several calls
    memory.deviations[number] = deviation
    if plan is not None and not repeats and plan.inverse.shape == deviation.shape:
        skipped = torch.ones_like(deviation).scatter(1, plan.kept(), 0)
        skips = memory.skips.get(number)
        same = skips is not None and skips.shape == skipped.shape
        memory.skips[number] = skips + skipped if same and skips is not None else skipped
