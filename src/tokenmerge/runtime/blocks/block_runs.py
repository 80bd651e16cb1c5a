"""Runs of blocks that are skipped together, and need one residual for all of them.

Where each block gets the very tensors that the block before it returned, the sum of their residuals is the
result of the last one less the input of the first one. A step that skips them adds this sum, extrapolated, in
the first block, and the others return what they get. Runs are found while a complete step runs: whatever the
host or a ControlNet changes between two blocks begins a new run. In a ControlNet, each block is a run of its
own, since more than the next block reads its result.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tokenmerge.models.call import HostCall
from tokenmerge.runtime.memory.caches import BlockRun
from tokenmerge.runtime.memory.context import RunningBlocks, ThreadState
from tokenmerge.runtime.memory.forecasts import note_forecast
from tokenmerge.runtime.memory.reuse import Residual, extrapolated, updated
from tokenmerge.runtime.memory.state import BlockState


def block_in_run(state: BlockState, call: HostCall, run: Callable[[], Any]) -> Any:
    """Return the result of a block that is skipped on some steps.

    Args:
        state: of the block, which can run on merged tokens as a whole.
        call: of the block.
        run: returns the result of a complete step.
    """
    assert state.block_layout is not None
    tokens, text = state.layout.tokens_of(call), call.argument("encoder_hidden_states")
    cache, number = state.threads.value.cache, state.call
    distance, known = state.model.context.decision.deep, cache.runs.get(number)
    if distance is not None and known is not None:
        if known.residual is None:
            return known.returned(tokens, text)
        added = extrapolated(known.residual, (tokens, text), distance)
        return known.returned(added[0], text if added[1] is None else added[1])
    place, thread = state.block_layout.outputs[0], state.model.threads.value
    running = thread.running_blocks
    goes_on = running is not None and not state.is_read_between and running.goes_on_with(tokens, text)
    result = run()
    image, other = (result, None) if isinstance(result, Tensor) else (result[place], result[1 - place])
    made = BlockRun(isinstance(result, Tensor), place, other is None)
    if running is not None and goes_on:
        cache.runs[number] = made
    else:
        finish_run(thread)
        before = cache.runs.get(number)
        running = thread.running_blocks = RunningBlocks((cache, number, before), (tokens, text))
        cache.runs[number] = dataclasses.replace(made, residual=None if before is None else before.residual)
    running.end_with(image, other)
    return result


def finish_run(thread: ThreadState) -> None:
    """Cache the residual of the blocks that have run, if there are any."""
    running, thread.running_blocks = thread.running_blocks, None
    if running is None:
        return
    cache, number, before = running.first
    image, text = running.end
    tokens, given_text = running.start
    added = image - tokens
    _share_with_plans(thread, (tokens, image), added)
    latest = (added, None if text is given_text else text - given_text)
    residual = Residual(False, latest)
    same = before is not None and before.residual is not None and before.blocks == running.blocks
    known = before.residual if same and before is not None else None
    note_forecast(thread, "deep", known, residual)
    residual = updated(known, residual, thread.part)
    made = cache.runs[number]
    cache.runs[number] = dataclasses.replace(made, residual=residual, blocks=running.blocks)


def _share_with_plans(thread: ThreadState, span: tuple[Tensor, Tensor], added: Tensor) -> None:
    """Cache one tensor for step reuse and for planning, where a run has all blocks of a level."""
    for place, other in thread.spans.items():
        if thread.memory is not None and len(other) == 2 and all(map(operator.is_, span, other)):
            thread.memory.model_residuals[place] = added
