"""The methods of a patched model: merge, call the host's own method, unmerge."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from tokenmerge.config import MergeSettings
from tokenmerge.models.base import Layer
from tokenmerge.models.call import HostCall
from tokenmerge.ops import Plan
from tokenmerge.runtime.blocks.block_runs import block_in_run
from tokenmerge.runtime.blocks.correction import corrected
from tokenmerge.runtime.blocks.features import caches_features, with_cached_features
from tokenmerge.runtime.blocks.host_method import HostMethod
from tokenmerge.runtime.blocks.merged_call import COMBINE, keyed_call, merged_call
from tokenmerge.runtime.blocks.planning import active_call, sequence_in
from tokenmerge.runtime.blocks.proportional_attention import ProportionalAttention
from tokenmerge.runtime.memory.caches import BlockMerge
from tokenmerge.runtime.memory.state import STATE, BlockState, LayerState

# These functions make the method of a swapped class from that of the original class. A module that is called
# through a reference to this method after it was restored has no state, and does what its class does.


def block_call(original: HostMethod) -> Callable:
    """Make the method of a transformer block, which plans for itself or for its sub-layers."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: BlockState | None = self.__dict__.get(STATE)
        compiling, trains = torch.compiler.is_compiling(), torch.is_grad_enabled()
        # Gradient checkpointing repeats calls, perhaps after one in which nothing merges.
        left_alone = not (compiling or trains) and state is not None and state.model.context.blocks_are_dense
        if state is None or left_alone:
            return original.of(self)(*args, **kwargs)
        if state.threads.value.running is None and not state.threads.value.counted:
            count_call(state)
        call = HostCall(original.of(self), original.names(), args, kwargs)
        if compiling:
            return _block(state, call)
        if trains:
            return _block_with_gradients(state, call)
        # A block that is compiled alone is skipped outside its graph, and its result is cached there.
        if state.model.caches_results:
            return with_caches(state, call, lambda: _block(state, call))
        return _block(state, call)

    return forward


def layer_call(original: HostMethod) -> Callable:
    """Make the method of attention or feed-forward, which runs on merged tokens."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: LayerState | None = self.__dict__.get(STATE)
        running = None if state is None else state.block.threads.value.running
        if state is None or running is None or not running.merges or state.threads.value.cache.dense:
            return original.of(self)(*args, **kwargs)
        call = HostCall(original.of(self), original.names(), args, kwargs)
        settings, layer = running.settings, state.layer
        if not takes_part(layer, settings) or not _fits(call, layer, running):
            return call.result()
        if settings.scope == "block":
            with _proportional(state, settings, running.plan):
                return call.result()
        combine = COMBINE[settings.combine]

        def merged(plan: Plan) -> Any:
            with _proportional(state, settings, plan):
                if settings.scope == "keys":
                    return keyed_call(self, call, state, plan, combine)
                return merged_call(call, layer.layout, plan, combine)

        if running.plan is not None and not state.block.model.context.decision.corrected:
            return merged(running.plan)
        residuals, number = state.threads.value.cache.residuals, state.block.call
        return corrected(residuals, number, running, layer.layout, combine, call, merged, (0.0, 0.0))

    return forward


def takes_part(layer: Layer, settings: MergeSettings) -> bool:
    """Return whether the calls of a layer change where its block merges with these settings."""
    if settings.scope == "keys":
        return layer.keys is not None
    if settings.scope == "block":  # its attention counts merged tokens for as many as they stand for
        return settings.proportional and layer.kind == "attn1" and layer.own_keys
    return layer.kind in settings.merged_layers


def _fits(call: HostCall, layer: Layer, running: BlockMerge) -> bool:
    """Return whether a layer is called with the tokens of the plan, and not with a part, as in chunks."""
    tokens, images, n = call.argument(call.names[0]), running.images, running.tokens
    if running.settings.scope == "block" and running.plan is not None:
        images, n = running.plan.keep.shape
    return tokens.shape[0] == images and tokens.shape[1] >= n and not call.has(layer.layout.dense_if)


def with_caches(state: BlockState, call: HostCall, run: Callable[[], Any]) -> Any:
    """Return the result of a block, which ``run`` returns where the block is not skipped.

    What the block added is cached where a plan of a later step needs it.
    """
    if caches_features(state):
        n = sequence_in(state, state.settings).tokens
        run = functools.partial(with_cached_features, state, call, n, run)
    return block_in_run(state, call, run) if is_skipped(state) else run()


def is_skipped(state: BlockState) -> bool:
    """Return whether a block is one of those that are skipped on some steps of the running generation."""
    return state.caches_residuals and state.model.context.decision.caches


def _block_with_gradients(state: BlockState, call: HostCall) -> Any:
    """Run a block, by the plan of its first run where gradient checkpointing runs it again."""
    block, tokens = state.threads.value, state.layout.tokens_of(call)
    if block.running is None:
        block.running = state.calls.get(tokens)
    if block.running is None:
        block.running = state.calls[tokens] = active_call(state, call)
    return _block(state, call)


def _block(state: BlockState, call: HostCall) -> Any:
    """Run a block: as a whole, or by its layers."""
    block = state.threads.value
    try:
        if block.running is None:
            block.running = active_call(state, call)
        running = block.running
        layout = state.block_layout if running.settings.scope == "block" else None
        if layout is None or not running.merges:
            return call.result()
        combine = COMBINE[running.settings.combine]

        def merged(plan: Plan) -> Any:
            return merged_call(call, layout, plan, combine, change_only=True)

        if running.plan is not None and not state.model.context.decision.corrected:
            return merged(running.plan)
        added_to = state.layout.tokens_of(call), call.argument("encoder_hidden_states")
        return corrected(block.cache.residuals, state.call, running, layout, combine, call, merged, added_to)
    finally:
        block.running = None


def count_call(state: BlockState) -> None:
    """Give the running call of a block a number: 0 with gradients, since the call may run again."""
    block = state.threads.value
    block.number = 0 if torch.is_grad_enabled() else block.number + 1


def _proportional(
    state: LayerState, settings: MergeSettings, plan: Plan | None
) -> AbstractContextManager[Any]:
    """Return a context in which attention counts merged tokens for as many as they stand for, if it shall."""
    layer = state.layer
    if plan is not None and settings.proportional and layer.kind == "attn1" and layer.own_keys:
        return ProportionalAttention(plan, layer.layout, state.block)
    return nullcontext()
