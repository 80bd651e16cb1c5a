"""The methods of a patched model: merge, call the host's own method, unmerge."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from tokenmerge.config import CACHED_FEATURES, MergeSettings
from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import Layer, Layout
from tokenmerge.models.call import HostCall, HostMethod
from tokenmerge.models.placement import splits_tokens
from tokenmerge.ops.plan import Plan
from tokenmerge.runtime.blocks.merged_call import (
    add_lost,
    added_to_image,
    keyed_call,
    merged_call,
    result_by_image,
)
from tokenmerge.runtime.blocks.planning import (
    active_call,
    caches_residual,
    pictures_of,
    stays_dense,
    with_cached_residual,
)
from tokenmerge.runtime.blocks.proportional_attention import ProportionalAttention
from tokenmerge.runtime.blocks.sequence_first import batch_first
from tokenmerge.runtime.blocks.stack import call_in_stack, is_in_stack
from tokenmerge.runtime.memory.caches import BlockMerge
from tokenmerge.runtime.memory.state import STATE, BlockState, LayerState

COMPILED = "_compiled_call_impl"  # where ``nn.Module.compile`` leaves what runs instead of ``forward``
MergedCall = Callable[[Plan], Any]  # returns the result of a call on the merged tokens of a plan

# These functions make the method of a swapped class from that of the original class. A module that is called
# through a reference to this method after it was restored has no state, and does what its class does.


def block_call(original: HostMethod) -> Callable:
    """Make the method of a transformer block, which plans for itself or for its sub-layers."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: BlockState | None = self.__dict__.get(STATE)
        # Gradient checkpointing repeats calls, perhaps after one in which nothing merges.
        generates = not (torch.compiler.is_compiling() or torch.is_grad_enabled())
        if state is None or (generates and state.model.context.blocks_are_dense):
            return original.of(self)(*args, **kwargs)
        block = state.threads.value
        if block.running is None and not block.runs_graph:
            count_call(state)
        call = HostCall(original.of(self), original.names(), args, kwargs)
        # A block that is compiled alone is in its stack outside its graph. PyTorch may run its code without a
        # graph, such as after too many recompilations.
        caches = (
            generates
            and not block.runs_graph
            and (state.model.context.has_stacks or state.model.caches_results)
        )
        if state.layout.sequence_first:
            return batch_first(state.layout, call, functools.partial(_run_block, state, caches))
        return _run_block(state, caches, call)

    return forward


def layer_call(original: HostMethod) -> Callable:
    """Make the method of attention or feed-forward, which runs on merged tokens."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: LayerState | None = self.__dict__.get(STATE)
        running = None if state is None else state.block.threads.value.running
        if state is None or running is None or running.is_dense or state.threads.value.cache.dense:
            return original.of(self)(*args, **kwargs)
        call = HostCall(original.of(self), original.names(), args, kwargs)
        if state.layer.layout.sequence_first:
            return batch_first(state.layer.layout, call, functools.partial(_layer, self, state, running))
        return _layer(self, state, running, call)

    return forward


def _layer(module: nn.Module, state: LayerState, running: BlockMerge, call: HostCall) -> Any:
    """Return the result of a layer in a block that merges."""
    settings = running.settings
    layer = state.layer
    if not takes_part(layer, settings) or not _fits(call, state, running):
        return call.result()
    weighs = settings.proportional and layer.kind == "attn1" and layer.own_keys

    def merged(plan: Plan) -> Any:
        batch = plan.keep.shape[0]
        images = 1
        if not layer.layout.batched:
            images = pictures_of(state.block.model.threads.value.context, batch)
        with ProportionalAttention(plan, layer.layout, state.block) if weighs else nullcontext():
            if settings.scope == "block":
                return call.result() if images == 1 else result_by_image(call, batch)
            if settings.scope == "keys":
                return keyed_call(module, call, state, plan, settings.combine)
            return merged_call(call, layer.layout, plan, settings.combine, images)

    if settings.scope == "block":
        return call.result() if running.plan is None else merged(running.plan)
    return _exact_or_corrected(state, running, call, layer.layout, merged)


def takes_part(layer: Layer, settings: MergeSettings) -> bool:
    """Return whether the calls of a layer change where its block merges with these settings."""
    if settings.scope == "keys":
        return layer.keys is not None
    if settings.scope == "block":
        # Its attention counts merged tokens for as many as they stand for, and may need positions by image.
        weighs = settings.proportional and layer.kind == "attn1" and layer.own_keys
        return weighs or not layer.layout.batched
    return layer.kind in settings.merged_layers


def _fits(call: HostCall, state: LayerState, running: BlockMerge) -> bool:
    """Return whether a layer is called with the tokens of the plan, and not with a part, as in chunks."""
    tokens = call.argument(call.names[0])
    images = running.images
    n = running.tokens
    if running.settings.scope == "block" and running.plan is not None:
        images, n = running.plan.keep.shape
    fits = tokens.shape[0] == images and tokens.shape[1] >= n
    return fits and not stays_dense(state.block, state.layer.layout, call)


def with_caches(state: BlockState, call: HostCall, run: Callable[[BlockState, HostCall], Any]) -> Any:
    """Return the result of a block, which ``run`` returns, as a part of its stack.

    What later plans compare is cached.
    """
    run_block = functools.partial(run, state)
    if caches_residual(state):
        run_block = functools.partial(with_cached_residual, state, run_block)
    if state.model.context.has_stacks and is_in_stack(state):
        return call_in_stack(state, call, run_block)
    return run_block(call)


def _run_block(state: BlockState, caches: bool, call: HostCall) -> Any:
    """Return the result of a block; with ``caches`` as a part of its stack."""
    return with_caches(state, call, _block) if caches else _block(state, call)


def _block(state: BlockState, call: HostCall) -> Any:
    block = state.threads.value
    try:
        if block.running is None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            tokens = state.layout.tokens_of(call)  # with which gradient checkpointing runs it again
            block.running = state.calls.get(tokens) or active_call(state, call)
            state.calls[tokens] = block.running
        elif block.running is None:
            block.running = active_call(state, call)
        settings = block.running.settings
        running = block.running
        layout = state.block_layout if settings.scope == "block" else None
        if layout is None or running.is_dense or running.merges_in_stack:
            return call.result()

        def merged(plan: Plan) -> Any:
            images = 1
            if not layout.batched:
                images = pictures_of(state.model.threads.value.context, plan.keep.shape[0])
            return merged_call(call, layout, plan, settings.combine, images, change_only=True)

        return _exact_or_corrected(state, running, call, layout, merged)
    finally:
        block.running = None


def _exact_or_corrected(
    state: BlockState | LayerState, running: BlockMerge, call: HostCall, layout: Layout, merged: MergedCall
) -> Any:
    """Return the result of a block or layer: exact where the loss of merging is measured, else corrected."""
    block = state if isinstance(state, BlockState) else state.block
    plan = running.plan
    if plan is not None and not block.model.threads.value.context.decision.corrects:
        return merged(plan)
    residuals = state.threads.value.cache.residuals
    number = block.call
    before = residuals.get(number)
    if plan is None:
        result = call.result()
    elif before is None:
        return merged(plan)
    else:
        result = add_lost(layout, plan, merged(plan), before, running.settings.combine)
    base = block.layout.tokens_of(call) if state is block else 0.0
    residuals[number] = added_to_image(layout, result, base, running.tokens)
    return result


def count_call(state: BlockState) -> None:
    """Give the running call of a block a number: 0 with gradients, since the call may run again."""
    block = state.threads.value
    block.number = 0 if torch.is_grad_enabled() else block.number + 1


def compiled_block(names: Callable[[], Sequence[str]]) -> property:
    """Return the attribute in which a compiled block has its graph; the graph is called with a plan.

    If other calls use the plan too, it is an input of the graph. Otherwise there would be two graphs: one
    that makes a plan, and one that takes one. ``names`` returns the parameters of ``forward``, in order.
    """

    def call_graph(self: nn.Module, graph: Callable, *args: Any, **kwargs: Any) -> Any:
        state: BlockState | None = self.__dict__.get(STATE)
        if state is None or torch.compiler.is_compiling():
            return graph(*args, **kwargs)
        context = state.model.context
        # A plan that serves one call is better made in the graph, where its operations are fused. What the
        # step log counts, and what is read from a cache, is outside.
        outside = (
            context.caches_plans or context.step_log is not None or state.settings.features in CACHED_FEATURES
        )
        if not (outside or is_in_stack(state) or caches_residual(state)):
            return graph(*args, **kwargs)
        if splits_tokens(self):
            raise UnsupportedModelError(
                f"{state.path}: context parallelism splits tokens inside the graph of this block, and "
                "what is cached between calls is for the part of each device; leave the model uncompiled, or "
                "take reuse.every=1, merge_sharing.every=1, merge_sharing.blocks=False, "
                "merge_sharing.guidance=False, features='input', and no patch.record_steps()"
            )
        count_call(state)
        call = HostCall(graph, names(), args, kwargs)

        def run_graph(state: BlockState, call: HostCall) -> Any:
            block = state.threads.value
            if block.running is None and outside:
                block.running = active_call(state, call)
            block.runs_graph = True
            try:
                return call.result()
            finally:
                block.running = None
                block.runs_graph = False

        if state.layout.sequence_first:
            return batch_first(state.layout, call, functools.partial(with_caches, state, run=run_graph))
        return with_caches(state, call, run_graph)

    return compiled_attribute(call_graph)


def compiled_attribute(call_graph: Callable[..., Any]) -> property:
    """Return the attribute in which a compiled module has its graph, which ``call_graph`` calls.

    That function gets the module, the graph, and the arguments of the call.
    """

    def get(self: nn.Module) -> Callable | None:
        graph = self.__dict__.get(COMPILED)
        return None if graph is None else functools.partial(call_graph, self, graph)

    def put(self: nn.Module, graph: Callable | None) -> None:
        self.__dict__[COMPILED] = graph

    return property(get, put)
