"""Stacks of blocks: they merge once, are corrected once, and are skipped together.

A stack is a run of blocks with nothing between them that looks at the tokens. Its tokens merge before the
first block and are unmerged after the last one. M merges, U unmerges, and f stands for all of its blocks:

    y = x + U (f(M x) − M x) + lost(R),    lost(R) = R − U M R,    R = y − x of the step before

This equals merging around each block, since M U is the identity: what a block gets is the merged result of
the block before it. Corrections of single blocks add up to lost(R), since M lost(R) = 0. So one residual R
for each stack is all that is cached. Planners compare it, and steps that skip the stack extrapolate it.

Nobody says where a stack ends. A block returns :class:`StackTokens`, and the next block takes the merged
tokens from them. Anything else that reads them gets ordinary tokens, and the stack ends there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tokenmerge.config import SOFT_PLANNERS, MergeSettings
from tokenmerge.models.base import Layout
from tokenmerge.models.call import HostCall
from tokenmerge.ops.plan import Plan
from tokenmerge.runtime.blocks.lazy_tokens import LazyTokens, plain
from tokenmerge.runtime.blocks.merged_call import merged_tokens, with_change, with_merged_tokens
from tokenmerge.runtime.blocks.planning import active_call, note_plan, pictures_of, sequence_in, stays_dense
from tokenmerge.runtime.blocks.skipping import note_forecast
from tokenmerge.runtime.memory.caches import (
    BlockMerge,
    CallNumbers,
    Residual,
    StackResidual,
    extrapolated,
    updated,
)
from tokenmerge.runtime.memory.state import BlockState, ThreadState

Run = Callable[[HostCall], Any]  # makes a call of a block, without what its stack does


@dataclasses.dataclass(eq=False)
class Stack:
    """A stack that runs in a call of the model."""

    thread: ThreadState
    first: BlockState
    number: CallNumbers  # of the first block
    start: Tensor  # tokens that the first block was called with, with the text that shares their sequence
    text: Any  # the other stream of tokens that it was called with, or None
    before: StackResidual | None  # what is cached of it from the step before
    made: StackResidual  # what takes its place
    settings: MergeSettings | None  # those by which its whole blocks merge; None where they do not
    plan: Plan | None  # None where nothing merges in this step
    n: int  # image tokens of each image, as the plan counts them
    value: Tensor  # what its last block returned so far, in merged tokens if there is a plan
    text_value: Any  # the other stream that its last block returned
    start_merged: Tensor | None = None  # ``start`` in merged tokens
    last: BlockState | None = None  # its last block so far
    blocks: int = 0  # that have run

    @property
    def layout(self) -> Layout:
        """The layout of its calls."""
        return self.first.block_layout or self.first.layout

    def continues_with(
        self, state: BlockState, tokens: Any, text: Any, settings: MergeSettings | None
    ) -> bool:
        """Return whether a block is called with what the last block returned, and merges as that does."""
        if not isinstance(tokens, StackTokens) or tokens.stack is not self or tokens.blocks != self.blocks:
            return False
        if settings is not self.settings or tokens.was_read:
            return False
        if settings is not None and state.block_layout != self.first.block_layout:
            return False
        # What steps that skip the stack add to the text is cached too. Blocks without text pass it on.
        return not is_skipped(state) or text is self.text_value or text is None

    def unmerged(self, value: Tensor, correction: Tensor | None = None) -> Tensor:
        """Return ordinary tokens for what a block returned: those of ``start``, with what was added to them.

        ``correction`` ``[b, n, c]`` is what the stack added to the image in the step before.
        """
        if self.plan is None:
            return value
        assert self.settings is not None
        assert self.start_merged is not None
        combine = self.settings.combine
        return with_change(self.layout, self.plan, self.start, self.start_merged, value, combine, correction)


class StackTokens(LazyTokens):
    """The tokens between two blocks of a stack: merged, or all of them in a step that merges nothing.

    To others it is a tensor ``[b, n, c]`` of ordinary tokens.
    """

    stack: Stack
    value: Tensor
    blocks: int  # of the stack that had run
    path: str  # of the block that returned it

    @classmethod
    def of(cls, stack: Stack) -> StackTokens:
        """Return what the last block of a stack returned so far."""
        assert stack.last is not None
        tokens = cls.like(stack.start, stack.value)
        tokens.stack = stack
        tokens.value = stack.value
        tokens.blocks = stack.blocks
        tokens.path = stack.last.path
        return tokens

    def make(self) -> Tensor:
        """Return ordinary tokens. If no block has run since, the stack ends here."""
        stack = self.stack
        thread = stack.thread
        thread.memory.read_between.add(self.path)
        if thread.stack is stack and stack.blocks == self.blocks:
            ended = end_stack(thread)
            assert ended is not None
            return ended
        # The stack went on. It ends here from the next step on, which measures what its parts lose.
        thread.memory.tracker.measure_next(stack.number[0])
        return stack.unmerged(self.value)


def is_skipped(state: BlockState) -> bool:
    """Return whether a block is one of those that are skipped on some steps of the running generation."""
    return state.caches_residuals and state.model.context.decision.caches


def is_in_stack(state: BlockState) -> bool:
    """Return whether the running call of a block belongs to a stack."""
    context = state.model.context
    if is_skipped(state) or (state.level, "model_residual") in context.caches_features:
        return True
    settings = context.settings[state.level]
    return state.merges and merges_in_stacks(context.shares_plans, settings)


def merges_in_stacks(shares_plans: bool, settings: MergeSettings) -> bool:
    """Return whether blocks with these settings merge once for a stack, where they can merge as a whole.

    A soft plan keeps a merge for each block, since merging what it unmerged changes the tokens. So does a
    planner that compares what a single block added.
    """
    return (
        shares_plans
        and settings.scope == "block"
        and settings.merges
        and settings.planner not in SOFT_PLANNERS
        and settings.features != "residual"
    )


def _settings_of_merge(state: BlockState, call: HostCall) -> MergeSettings | None:
    """Return the settings by which a block merges as a whole here; None if it does not, in any step."""
    context = state.model.context
    settings = context.settings[state.level]
    if not merges_in_stacks(context.shares_plans, settings):
        return None
    if not state.merges or state.block_layout is None or state.threads.value.cache.dense:
        return None
    if len(state.block_layout.outputs) > 1:  # what else it returns for each token is for somebody else
        return None
    if stays_dense(state, state.block_layout, call) or not sequence_in(state, settings).removed:
        return None
    return settings


def call_in_stack(state: BlockState, call: HostCall, run: Run) -> Any:
    """Return the result of a block in a stack, which merges, is corrected and is skipped as one."""
    context = state.model.context
    thread = state.model.threads.value
    block = state.threads.value
    tokens = state.layout.tokens_of(call)
    text = call.argument(state.beside)
    residuals = block.cache.skippable
    number = state.call
    known = residuals.get(number)
    assert known is None or isinstance(known, StackResidual)
    if context.decision.deep is not None and known is not None and state.caches_residuals:
        return _skipped(state, known, tokens, text, context.decision.deep)
    settings = _settings_of_merge(state, call)
    stack = running_stack(thread)
    if stack is None or not stack.continues_with(state, tokens, text, settings):
        tokens = plain(tokens)
        end_stack(thread)
        stack = _begin(state, _with_tokens(state, call, tokens), tokens, text, settings)
    made = stack.made if stack.blocks == 0 else StackResidual()
    residuals[number] = made
    try:
        result = run(_prepared(state, stack, call))
    finally:
        block.running = None
    place = state.image_place
    image = result if isinstance(result, Tensor) else result[place]
    other = None if isinstance(result, Tensor) else result[1 - place]
    made.single = isinstance(result, Tensor)
    made.no_text = other is None
    stack.value = image
    stack.last = state
    stack.blocks += 1
    if other is not None:
        stack.text_value = other
    ends = state.is_last or state.is_read_between or state.path in thread.memory.read_between
    returned = end_stack(thread) if ends else StackTokens.of(stack)
    if isinstance(result, Tensor):
        return returned
    return tuple(returned if index == place else value for index, value in enumerate(result))


def running_stack(thread: ThreadState) -> Stack | None:
    """Return the stack that runs in a thread, or None."""
    stack = thread.stack
    assert stack is None or isinstance(stack, Stack)
    return stack


def end_stack(thread: ThreadState) -> Tensor | None:
    """End the running stack, and cache what it added.

    Return its ordinary tokens, to which what merging loses is given back, or None where no stack runs.
    """
    stack = running_stack(thread)
    thread.stack = None
    if stack is None or stack.last is None:
        return None
    decision = stack.first.model.context.decision
    layout = stack.layout
    known = stack.before.residual if stack.before is not None else None
    # After a change of what belongs to the stack, what it added before is for other blocks.
    if known is not None and (stack.before is None or stack.before.blocks != stack.blocks):
        known = None
    correction = None
    if decision.corrects and stack.plan is not None:
        if known is not None and known.latest[0].shape == stack.start.shape:
            correction = layout.image(known.latest[0], stack.n)
        else:
            thread.memory.tracker.measure_next(stack.number[0])
    tokens = stack.unmerged(stack.value, correction)
    of_level = (stack.first.level, "model_residual") in stack.first.model.context.caches_features
    if not (of_level or decision.corrects or is_skipped(stack.first)):
        return tokens
    added = tokens - stack.start
    if of_level:
        _note_level(stack, tokens, added)
    if is_skipped(stack.first):
        thread.ran.add("deep")
        note_forecast(thread, "deep", known, added)
        text = None if stack.text_value is stack.text else stack.text_value - stack.text
        stack.made.residual = updated(known, (added, text), thread.shard)
    elif decision.corrects:
        stack.made.residual = Residual((added, None), (), ())
    stack.made.blocks = stack.blocks
    return tokens


def _begin(
    state: BlockState, call: HostCall, tokens: Tensor, text: Any, settings: MergeSettings | None
) -> Stack:
    """Begin a stack at a block that is called with these ordinary tokens."""
    thread = state.model.threads.value
    context = state.model.context
    known = state.threads.value.cache.skippable.get(state.call)
    assert known is None or isinstance(known, StackResidual)
    made = StackResidual(residual=None if known is None else known.residual)
    plan = None
    n = tokens.shape[1]
    start_merged = None
    if settings is not None:
        running = active_call(state, call)
        plan = running.plan
        if plan is not None:
            n = running.tokens
            layout = state.block_layout
            assert layout is not None
            start_merged = merged_tokens(layout, plan, tokens, settings.combine)
    value = tokens if start_merged is None else start_merged
    if state.is_first and (state.level, "model_residual") in context.caches_features:
        thread.spans[(*state.call, state.level)] = tokens
    stack = Stack(
        thread, state, state.call, tokens, text, known, made, settings, plan, n, value, text, start_merged
    )
    thread.stack = stack
    return stack


def _prepared(state: BlockState, stack: Stack, call: HostCall) -> HostCall:
    """Return the call of a block with the tokens of its stack, and note for its layers what merges."""
    block = state.threads.value
    layout = state.block_layout or state.layout
    known = _from_the_stack(call, layout, stack)
    if stack.settings is None or stack.plan is None:
        if stack.settings is not None:
            block.running = BlockMerge(stack.settings)
        now = _with_tokens(state, call, stack.value)
    else:
        block.running = BlockMerge(
            stack.settings, False, len(stack.value), stack.n, stack.plan, merges_in_stack=True
        )
        if stack.blocks:
            note_plan(state, stack.settings)
        images = 1 if layout.batched else pictures_of(state.model.context, len(stack.plan.keep))
        for name in known:  # they are merged already
            call = call.replaced(name, None)
        combine = stack.settings.combine
        now = with_merged_tokens(call, layout, stack.plan, stack.value, combine, images)
    for name, value in known.items():
        now = now.replaced(name, value)
    return now


def _from_the_stack(call: HostCall, layout: Layout, stack: Stack) -> dict[str, Tensor]:
    """Return the arguments of a call that are tokens of its own stack, by a skip connection."""
    found: dict[str, Tensor] = {}
    for argument in layout.token_arguments if stack.blocks else ():
        value = call.argument(argument.name)
        if argument.combined and isinstance(value, StackTokens) and value.stack is stack:
            found[argument.name] = value.value
    return found


def _with_tokens(state: BlockState, call: HostCall, tokens: Tensor) -> HostCall:
    if state.layout.tokens_of(call) is tokens:
        return call
    return call.replaced(state.layout.tokens or call.names[0], tokens)


def _skipped(state: BlockState, known: StackResidual, tokens: Any, text: Any, distance: Tensor) -> Any:
    """Return the result of a block that the step skips: the first one of a stack stands for all of it."""
    if known.residual is not None:
        tokens, changed = extrapolated(known.residual, (plain(tokens), text), distance)
        text = text if changed is None else changed
    if known.single:
        return tokens
    other = None if known.no_text else text
    return (tokens, other) if state.image_place == 0 else (other, tokens)


def _note_level(stack: Stack, tokens: Tensor, added: Tensor) -> None:
    """Note what all blocks of a level added to the image, if this stack has the last of them."""
    thread = stack.thread
    last = stack.last
    assert last is not None
    place = (*stack.number, last.level)
    start = thread.spans.get(place)
    if not last.is_last or start is None:
        return
    thread.memory.model_residuals.pop(place, None)
    if start is stack.start:
        thread.memory.model_residuals[place] = added  # one tensor for the planner, corrections and skipping
        return
    if start.shape[1] < tokens.shape[1]:  # the text has joined the sequence since
        tokens = stack.layout.image(tokens, start.shape[1])
    if start.shape == tokens.shape:
        thread.memory.model_residuals[place] = tokens - start
