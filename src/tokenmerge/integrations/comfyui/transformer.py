"""Replacements of the blocks of transformers, which merge once for a stack of blocks.

The formula is that of :mod:`tokenmerge.runtime.blocks.stack`. A block returns :class:`StackTokens`, and the
next one takes the merged tokens from them. What else reads them, such as a ControlNet, gets ordinary tokens,
and the stack ends there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from tokenmerge.config import MergeSettings
from tokenmerge.integrations.comfyui.models import Key
from tokenmerge.integrations.comfyui.sampling import Running, Sampling, sampling_in
from tokenmerge.models.base import Layout
from tokenmerge.models.call import HostCall
from tokenmerge.ops.partition import num_tokens
from tokenmerge.runtime.blocks.lazy_tokens import LazyTokens, plain
from tokenmerge.runtime.blocks.merged_call import merged_tokens, with_change, with_merged_tokens
from tokenmerge.runtime.memory.caches import Tensors, each, extrapolated, updated

Block = Callable[[dict[str, Any]], dict[str, Any]]  # ComfyUI's call of a block


@dataclasses.dataclass(frozen=True, eq=False)
class ReplacedBlock:
    """What ComfyUI calls instead of a block.

    ``layout`` is that of the block's call, and ``inner`` the replacement by another node, if there is one.
    ``is_last`` says whether no block runs after it.
    """

    key: Key
    layout: Layout
    inner: Callable[..., Any] | None = None
    is_last: bool = False

    def __call__(self, arguments: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        """Return the result of the block, which runs on merged tokens."""

        def block(given: dict[str, Any]) -> dict[str, Any]:
            return extra["original_block"](given) if self.inner is None else self.inner(given, extra)

        sampling = sampling_in(arguments.get("transformer_options"))
        if sampling is None:
            return block(arguments)
        if sampling.decision.caches:
            skipped = _skipped(sampling, self.key, arguments)
            if skipped is not None:
                return skipped
        return self._full(sampling, block, arguments)

    def _full(self, sampling: Sampling, block: Block, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the result of the block if it is not skipped."""
        given = arguments["img"]
        merges = self._merges(sampling, arguments)
        if sampling.decision.caches:
            _continue_run(sampling, self.key, given, arguments.get("txt"))
        stack: Stack | None = sampling.stack
        if stack is None or not stack.continues_with(arguments, merges):
            arguments = {**arguments, "img": plain(given)}
            end_stack(sampling)
            if not merges and not sampling.decision.caches:
                return block(arguments)
            stack = _begin(sampling, self, arguments, merges)
        result = stack.run(block, arguments)
        stack.value = result["img"]
        stack.text_value = result.get("txt")
        stack.blocks.append(self.key)
        if self.is_last or not stack.may_go_on:
            image: Any = end_stack(sampling)
        else:
            image = StackTokens.of(stack)
        if sampling.block_run is not None:
            sampling.block_run.returned = image, stack.text_value
        return {"img": image, "txt": stack.text_value}  # None if a block returns no text

    def _merges(self, sampling: Sampling, arguments: dict[str, Any]) -> bool:
        """Return whether the block can merge with these arguments."""
        call = HostCall(_no_function, (), (), arguments)
        tokens = self.layout.tokens_of(call)
        if self.key[0] == "double_block" and tokens.shape[1] != num_tokens(sampling.grid):
            # Single-stream blocks, which run later, cannot tell them from text.
            sampling.has_references = True
        # In Wan 2.2, frames have modulations of their own: [b, f, 6, c].
        modulation = arguments.get("vec")
        of_frames = isinstance(modulation, Tensor) and modulation.ndim > 3 and modulation.shape[1] > 1
        if sampling.has_references or of_frames or call.has(self.layout.dense_if):
            return False
        return sampling.settings_in(sampling.grid, 1) is not None


@dataclasses.dataclass(eq=False)
class Stack:
    """Blocks that run one after another, each on what the last one returned."""

    sampling: Sampling
    layout: Layout
    start: Tensor  # tokens that the first block was called with, with the text that shares their sequence
    text: Tensor | None  # the other stream of tokens that it was called with
    running: Running | None  # what merges, or None if these blocks are dense
    value: Tensor  # what the last block returned, in merged tokens if there is a plan
    text_value: Tensor | None
    start_merged: Tensor | None = None  # ``start`` in merged tokens, or None if there is no plan
    blocks: list[Key] = dataclasses.field(default_factory=list)  # that have run

    @property
    def may_go_on(self) -> bool:
        """Whether the next block may continue with merged tokens."""
        return self.running is None or self.sampling.in_stacks(self.running.settings)

    def continues_with(self, arguments: dict[str, Any], merges: bool) -> bool:
        """Return whether a block is called with what the last block returned, and merges as that does."""
        tokens = arguments["img"]
        if not isinstance(tokens, StackTokens) or tokens.stack is not self:
            return False
        if tokens.blocks != len(self.blocks) or merges != (self.running is not None):
            return False
        text = arguments.get("txt")
        # A block that returns no text may get another one.
        same_text = text is self.text_value or self.text_value is None
        return same_text or not self.sampling.decision.caches

    def run(self, block: Block, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the result of a block on the tokens of the stack."""
        if not self.blocks and self.text is not None:
            # ComfyUI's blocks add to their input in place. The copy keeps the input for the difference.
            arguments = {**arguments, "txt": self.text.clone()}
        running = self.running
        if running is None or running.plan is None:
            return block({**arguments, "img": self.value})
        call = HostCall(_no_function, (), (), arguments)
        combine = running.settings.combine
        given = with_merged_tokens(call, self.layout, running.plan, self.value, combine).kwargs
        self.sampling.running = running
        running.weighs = running.settings.proportional
        try:
            return block(given)
        finally:
            self.sampling.running = None

    def unmerged(self, value: Tensor, correction: Tensor | None = None) -> Tensor:
        """Return ordinary tokens for what a block returned: see :func:`with_change`."""
        if self.running is None or self.running.plan is None:
            return value
        assert self.start_merged is not None
        plan = self.running.plan
        combine = self.running.settings.combine
        return with_change(self.layout, plan, self.start, self.start_merged, value, combine, correction)


class StackTokens(LazyTokens):
    """The tokens between two blocks of a stack.

    To others they are a tensor ``[b, n, c]`` of ordinary tokens.
    """

    stack: Stack
    value: Tensor
    blocks: int  # of the stack that had run

    @classmethod
    def of(cls, stack: Stack) -> StackTokens:
        """Return what the last block of a stack returned."""
        tokens = cls.like(stack.start, stack.value)
        tokens.stack = stack
        tokens.value = stack.value
        tokens.blocks = len(stack.blocks)
        return tokens

    def make(self) -> Tensor:
        """Return ordinary tokens, and end the stack."""
        stack = self.stack
        if stack.sampling.stack is stack and self.blocks == len(stack.blocks):
            ended = end_stack(stack.sampling)
            assert ended is not None
            return ended
        return stack.unmerged(self.value)


def _no_function() -> None:
    """Stand for the function of a call that only holds arguments."""


def _begin(sampling: Sampling, block: ReplacedBlock, arguments: dict[str, Any], merges: bool) -> Stack:
    tokens = arguments["img"]
    text = arguments.get("txt")
    running = None
    start_merged = None
    if merges:
        settings = sampling.settings_in(sampling.grid, 1)
        assert settings is not None
        group = "all" if sampling.in_stacks(settings) else block.key
        compared = _compared(sampling, settings, block.layout, tokens)
        are_added = compared is not tokens
        running = sampling.merge_in(block.key, group, compared, block.layout, sampling.grid, 1, are_added)
    # ComfyUI's blocks add to their input in place. A copy keeps the input for the difference.
    if running is not None and running.plan is not None:
        start_merged = merged_tokens(block.layout, running.plan, tokens, running.settings.combine)
        value = start_merged.clone()
    else:
        value = tokens.clone()
    stack = Stack(sampling, block.layout, tokens, text, running, value, text, start_merged)
    sampling.stack = stack
    return stack


def _compared(sampling: Sampling, settings: MergeSettings, layout: Layout, tokens: Tensor) -> Tensor:
    """Return the tokens by which a plan is made: the input, or what all blocks added in the step before."""
    if settings.features == "input":
        return tokens
    n = num_tokens(sampling.grid)
    added = [layout.image(residual, n) for residual, _ in sampling.of_kind("stack") if residual.shape[1] >= n]
    return sum(added[1:], added[0]) if added else tokens


def end_stack(sampling: Sampling) -> Tensor | None:
    """End the running stack, and return its ordinary tokens, or None where no stack runs.

    What merging loses of the stack's residual is given back, from the step before.
    """
    stack: Stack | None = sampling.stack
    sampling.stack = None
    if stack is None or not stack.blocks:
        return None
    name = "stack", stack.blocks[0]
    correction = None
    merged = stack.running is not None and stack.running.plan is not None
    if merged and sampling.decision.corrects:
        residual, blocks = sampling.of(name) or (stack.start, 0)  # which is for no blocks
        if blocks == len(stack.blocks):
            correction = stack.layout.image(residual, num_tokens(sampling.grid))
        else:
            sampling.tracker.measure_next(sampling.tracker.call)
    tokens = stack.unmerged(stack.value, correction)
    keeps = stack.running is not None and (
        sampling.decision.corrects or stack.running.settings.features == "model_residual"
    )
    if not keeps and not sampling.decision.caches:
        return tokens
    added = tokens - stack.start
    if keeps:
        sampling.keep(name, (added, len(stack.blocks)))
    if sampling.block_run is not None:
        changed = None
        if stack.text is not None and stack.text_value is not None:
            changed = stack.text_value - stack.text
        sampling.block_run.add(added, changed)
    return tokens


@dataclasses.dataclass(eq=False)
class BlockRun:
    """Blocks that steps skip together. Between them, only a ControlNet may add to the tokens, in place."""

    blocks: list[Hashable]
    returned: Tensors = (None, None)  # image and text that the last one returned
    added: Tensors | None = None  # what the stacks of these blocks added, or None before the first one ended

    def add(self, image: Tensor, text: Tensor | None) -> None:
        """Note what a stack added."""
        if self.added is None:
            self.added = image, text
        else:  # in float32, since half precision would lose some of a sum
            self.added = each(lambda total, more: total.float() + more, self.added, (image, text))


def _skipped(sampling: Sampling, block: Key, arguments: dict[str, Any]) -> dict[str, Any] | None:
    """Return the result of a block in a step that skips it, or None if it has to run.

    The first block of a run adds the extrapolated sum of what all of them added in full steps. The others
    return their input. The sum does not include what a ControlNet adds between two blocks, since ComfyUI
    adds it in steps that skip them too.
    """
    distance = sampling.decision.deep
    known = sampling.of(("run", block))
    if distance is None or known is None:
        return None
    residual, _ = known
    image = arguments["img"]
    text = arguments.get("txt")
    if residual is not None:
        image, changed = extrapolated(residual, (image, text), distance)
        text = text if changed is None else changed
    return {"img": image, "txt": text}


def _continue_run(sampling: Sampling, block: Key, image: Any, text: Any) -> None:
    """Add a block to the running run if it got what the last block returned, or else to a new one."""
    run: BlockRun | None = sampling.block_run
    if run is not None:
        last_image, last_text = run.returned
        # A block that returns no text may get another one.
        if image is last_image and (text is last_text or last_text is None):
            run.blocks.append(block)
            return
    finish_run(sampling)
    sampling.block_run = BlockRun([block])


def finish_run(sampling: Sampling) -> None:
    """Cache the residual of the blocks that have run, if there are any, with their number."""
    end_stack(sampling)
    run: BlockRun | None = sampling.block_run
    sampling.block_run = None
    if run is None or run.added is None:
        return
    sampling.ran.add("deep")
    first, *others = (("run", block) for block in run.blocks)
    before, blocks = sampling.of(first) or (None, 0)
    residual = updated(before if blocks == len(run.blocks) else None, run.added)
    sampling.keep(first, (residual, len(run.blocks)))
    for block in others:
        sampling.keep(block, (None, 0))
