"""The methods of a patched model: merge, call the host's own method, unmerge."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from tokenmerge.config import MergeSettings
from tokenmerge.models.call import HostCall
from tokenmerge.ops import Plan
from tokenmerge.runtime.blocks.block_runs import block_in_run
from tokenmerge.runtime.blocks.checkpointing import record, with_gradients
from tokenmerge.runtime.blocks.correction import corrected, inputs_of
from tokenmerge.runtime.blocks.features import caches_features, with_cached_features
from tokenmerge.runtime.blocks.host_method import HostMethod
from tokenmerge.runtime.blocks.keys import keyed_call
from tokenmerge.runtime.blocks.merged_call import COMBINE, merged_call
from tokenmerge.runtime.blocks.planning import pictures_to_merge, plan_of, sequence_in
from tokenmerge.runtime.blocks.proportional_attention import ProportionalAttention
from tokenmerge.runtime.memory.caches import RecordedCall
from tokenmerge.runtime.memory.context import ActiveMerge, CallContext
from tokenmerge.runtime.memory.state import STATE, BlockState, LayerState

# These functions make the method of a swapped class from that of the original class. A module that is called
# through a reference to this method after it was restored has no state, and does what its class does.


def block_call(original: HostMethod) -> Callable:
    """Make the method of a transformer block, which plans for itself or for its sub-layers."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: BlockState | None = self.__dict__.get(STATE)
        if state is None:
            return original.of(self)(*args, **kwargs)
        if state.threads.value.known is None and not state.threads.value.counted:
            count_call(state)
        call = HostCall(original.of(self), original.names(), args, kwargs)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return with_gradients(state, call, lambda: _block(state, call))
        # A block that is compiled alone is skipped outside its graph, and its result is cached there.
        if state.model.facts.caches_results and not torch.compiler.is_compiling():
            return with_caches(state, call, lambda: _block(state, call))
        return _block(state, call)

    return forward


def layer_call(original: HostMethod) -> Callable:
    """Make the method of attention or feed-forward, which runs on merged tokens."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: LayerState | None = self.__dict__.get(STATE)
        active = None if state is None else state.block.threads.value.merge
        if state is None or active is None:
            return original.of(self)(*args, **kwargs)
        call = HostCall(original.of(self), original.names(), args, kwargs)
        settings = state.block.settings
        if state.threads.value.cache.dense or not _merges_here(state, settings, active, call):
            return call.result()
        combine, plan = COMBINE[settings.combine], active.plan
        if settings.scope == "block":
            with _proportional(state, settings, plan):
                return call.result()

        def merged(plan: Plan) -> Any:
            with _proportional(state, settings, plan):
                if settings.scope == "keys" and state.keys is not None:
                    return keyed_call(self, call, state, plan, combine)
                return merged_call(call, state.layout, plan, combine)

        if plan is not None and not state.block.model.context.config.correction.on:
            return merged(plan)
        residuals, number = state.threads.value.cache.residuals, state.block.call
        return corrected(
            residuals, number, active, state.layout, combine, call.result, merged, lambda count: [0.0] * count
        )

    return forward


def _merges_here(state: LayerState, settings: MergeSettings, active: ActiveMerge, call: HostCall) -> bool:
    """Return whether a layer's call takes part in what its block merges."""
    tokens, images, n = call.argument(call.names[0]), active.images, active.tokens
    if settings.scope == "block":
        takes_part = True
        if active.plan is not None:
            images, n = active.plan.keep.shape
    elif settings.scope == "keys":
        takes_part = state.keys is not None
    else:
        takes_part = state.kind in settings.merged_layers
    # Parts of the sequence, as in feed-forward chunking, do not fit the plan.
    fits = tokens.shape[0] == images and tokens.shape[1] >= n
    return takes_part and fits and not call.has(state.layout.dense_if)


def with_caches(state: BlockState, call: HostCall, run: Callable[[], Any]) -> Any:
    """Return the result of a block, which ``run`` returns where the block is not skipped.

    What the block added is cached where a plan of a later step needs it.
    """
    context = state.model.context
    if caches_features(state, context):
        run = functools.partial(with_cached_features, state, call, sequence_in(state).tokens, run)
    return block_in_run(state, call, run) if is_skipped(state, context) else run()


def is_skipped(state: BlockState, context: CallContext) -> bool:
    """Return whether a block is one of those that are skipped on some steps of the running generation."""
    return state.caches_residuals and context.decision.caches


def _block(state: BlockState, call: HostCall) -> Any:
    """Run a block: as a whole, or by its layers."""
    settings, context = state.settings, state.model.context
    block_layout = state.block_layout if settings.scope == "block" else None
    if settings.scope == "block" and (block_layout is None or call.has(block_layout.dense_if)):
        return call.result()
    block = state.threads.value
    records = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    try:
        known = block.known
        if known is None:
            known = active_call(state, call)
            if records:
                record(state, call, known)
        block.merge = active = known.merge
        if block_layout is None or active is None:
            return call.result()

        combine = COMBINE[settings.combine]

        def merged(plan: Plan) -> Any:
            return merged_call(call, block_layout, plan, combine, change_only=True)

        if active.plan is not None and not context.config.correction.on:
            return merged(active.plan)
        bases = functools.partial(inputs_of, state, call)
        return corrected(
            block.cache.residuals, state.call, active, block_layout, combine, call.result, merged, bases
        )
    finally:
        block.merge = None


def active_call(state: BlockState, call: HostCall) -> RecordedCall:
    """Find out what the running call of a block merges."""
    layout, context = state.layout, state.model.context
    tokens = layout.tokens_of(call)
    mask = call.argument(layout.padding) if layout.padding else None
    found = pictures_to_merge(state, tokens)
    if found is None or state.threads.value.cache.dense:
        return RecordedCall(state.settings, None)
    pictures, n = found
    plan = None if context.decision.measures else plan_of(state, context, pictures, n, tokens, mask)
    padded = n if mask is None else tokens.shape[1]
    return RecordedCall(state.settings, ActiveMerge(tokens.shape[0], padded, plan))


def count_call(state: BlockState) -> None:
    """Give the running call of a block a number: 0 with gradients, since the call may run again."""
    block = state.threads.value
    block.number = 0 if torch.is_grad_enabled() else block.number + 1


def _proportional(
    state: LayerState, settings: MergeSettings, plan: Plan | None
) -> AbstractContextManager[Any]:
    if plan is not None and settings.proportional and state.kind == "attn1" and state.own_keys:
        return ProportionalAttention(plan, state.layout, state.block)
    return nullcontext()
