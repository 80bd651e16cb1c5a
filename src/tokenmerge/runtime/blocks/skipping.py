"""Parts of a model that are skipped on some steps: stages of a UNet, and runs of blocks.

Where each block gets the very tensors that the block before it returned, the sum of their residuals is the
result of the last one less the input of the first one. A step that skips them adds this sum, extrapolated, in
the first block, and the others return what they get. Runs are found while a complete step runs: whatever the
host or a ControlNet changes between two blocks begins a new run. In a ControlNet, each block is a run of its
own, since more than the next block reads its result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tokenmerge.models.call import HostCall, HostMethod
from tokenmerge.ops.once import version_of
from tokenmerge.runtime.memory.caches import Residual, extrapolated, updated
from tokenmerge.runtime.memory.state import STATE, BlockState, StageState, ThreadState


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
            added = result.clone()  # hosts change results in place
            _note_forecast(state.model.threads.value, "finest" if state.is_finest else "deep", before, added)
            skippable[call] = updated(before, (added,))
        elif before is None:
            skippable[call] = tree_map(lambda tensor: tensor.new_zeros(()).expand(tensor.shape), result)
        return result

    return forward


@dataclasses.dataclass(eq=False)
class BlockRun:
    """A block in a run, from the last step that ran it."""

    single: bool  # it returned one tensor, and not a pair
    no_text: bool  # what it returned has no text
    residual: Residual | None = None  # in the first block, that of the whole run: image and text
    blocks: int = 0  # in the first block, their number


@dataclasses.dataclass(eq=False)
class RunningBlocks:
    """Blocks that have run one after another, each with the very tensors that the one before it returned."""

    first: BlockRun
    before: BlockRun | None  # what the first was when it ran before
    start: tuple[Tensor, Any]  # tokens of the image and of the text that it was called with
    end: tuple[Tensor, Any]  # those that the last block returned
    version: int | None = None  # of the image then, by ``version_of``
    blocks: int = 0

    def continues_with(self, image: Tensor, text: Any) -> bool:
        """Return whether a block is called with what the last one returned, unchanged."""
        last, known = self.end
        return image is last and version_of(image) == self.version and (text is known or text is None)


def block_in_run(state: BlockState, call: HostCall, run: Callable[[], Any]) -> Any:
    """Return the result of a block that is skipped on some steps; ``run`` returns that of a complete step."""
    tokens, text = state.layout.tokens_of(call), call.argument("encoder_hidden_states")
    skippable, number, place = state.threads.value.cache.skippable, state.call, state.image_place
    distance, known = state.model.context.decision.deep, skippable.get(number)
    if distance is not None and known is not None:
        if known.residual is not None:
            tokens, changed = extrapolated(known.residual, (tokens, text), distance)
            text = text if changed is None else changed
        if known.single:
            return tokens
        other = None if known.no_text else text
        return (tokens, other) if place == 0 else (other, tokens)
    thread = state.model.threads.value
    running: RunningBlocks | None = thread.running_blocks
    continues = running is not None and not state.is_read_between and running.continues_with(tokens, text)
    result = run()
    image, other = (result, None) if isinstance(result, Tensor) else (result[place], result[1 - place])
    made = skippable[number] = BlockRun(isinstance(result, Tensor), other is None)
    if running is None or not continues:
        finish_run(thread)
        made.residual = None if known is None else known.residual
        running = thread.running_blocks = RunningBlocks(made, known, (tokens, text), (tokens, text))
    running.end = image, running.end[1] if other is None else other  # blocks without text pass it on
    running.version, running.blocks = version_of(image), running.blocks + 1
    return result


def finish_run(thread: ThreadState) -> None:
    """Cache the residual of the blocks that have run, if there are any."""
    running: RunningBlocks | None = thread.running_blocks
    thread.running_blocks = None
    if running is None:
        return
    first, (tokens, given_text), (image, text) = running.first, running.start, running.end
    added = image - tokens
    for place, span in thread.spans.items():
        if len(span) == 2 and span[0] is tokens and span[1] is image:
            # The run has all blocks of a level, by which plans are made: one tensor serves both.
            thread.memory.model_residuals[place] = added
    latest = added, None if text is given_text else text - given_text
    known = running.before  # its number of blocks is 0 if it was interrupted
    before = known.residual if known is not None and known.blocks == running.blocks else None
    _note_forecast(thread, "deep", before, added)
    first.residual, first.blocks = updated(before, latest, thread.shard), running.blocks


def _note_forecast(thread: ThreadState, part: str, before: Residual | None, truth: Tensor) -> None:
    log, context = thread.memory.log, thread.context
    if log is not None and not torch.compiler.is_compiling():
        log.observe(log.note_forecast, context.decision, context.guidance_copies, part, before, truth)
