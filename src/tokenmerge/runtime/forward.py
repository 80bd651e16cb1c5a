"""The methods of a patched model: merge, call the host's own method, unmerge."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tokenmerge.config import CACHED_FEATURES, MergeSettings
from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.call import HostCall
from tokenmerge.models.layout import Layout
from tokenmerge.models.parallel import splits_tokens
from tokenmerge.ops import Plan, keep_destinations, merge
from tokenmerge.runtime.block_runs import block_in_run
from tokenmerge.runtime.caches import RecordedCall
from tokenmerge.runtime.context import ActiveMerge, CallContext
from tokenmerge.runtime.features import caches_features, with_cached_features
from tokenmerge.runtime.host_method import HostMethod
from tokenmerge.runtime.merged_call import add_lost, keyed_call, merged_call, of_image
from tokenmerge.runtime.planning import pictures_to_merge, plan_of, sequence_in
from tokenmerge.runtime.proportional_attention import ProportionalAttention
from tokenmerge.runtime.reuse import Residual, extrapolated, residual_of, updated
from tokenmerge.runtime.state import STATE, BlockState, LayerState, StageState

# Where ``nn.Module.compile`` leaves what a module runs instead of its ``forward``.
COMPILED = "_compiled_call_impl"

COMBINE = {"mean": merge, "keep": keep_destinations}

# These functions make the method of a swapped class from that of the original class. A module that is called
# through a reference to this method after it was restored has no state, and does what its class does.


def block_call(original: HostMethod) -> Callable:
    """The transformer block: plans from its input, for itself or for its sub-layers."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: BlockState | None = self.__dict__.get(STATE)
        if state is None:
            return original.of(self)(*args, **kwargs)
        if state.threads.value.known is None and not state.threads.value.counted:
            _count_call(state)
        call = HostCall(original.of(self), original.names(), args, kwargs)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _block_with_gradients(state, call)
        # A block that is compiled alone is skipped outside its graph, and its result is cached there.
        if state.model.facts.caches_results and not torch.compiler.is_compiling():
            return _with_caches(state, call, lambda: _block(state, call))
        return _block(state, call)

    return forward


def compiled_block(names: Callable[[], Sequence[str]]) -> property:
    """The attribute in which a block that is compiled alone has its graph; the graph is called with a plan.

    If other calls use the plan too, it is an input of the graph. Otherwise there would be two graphs: one
    that makes a plan, and one that takes a plan from another call.

    ``names`` returns the names of the parameters of the block's ``forward``, in order.
    """

    def call_graph(self: nn.Module, graph: Callable, *args: Any, **kwargs: Any) -> Any:
        state: BlockState | None = self.__dict__.get(STATE)
        if state is None or torch.compiler.is_compiling():
            return graph(*args, **kwargs)
        context = state.model.context
        caches = _is_skipped(state, context) or caches_features(state, context)
        if not (caches or _plans_outside(state)):
            return graph(*args, **kwargs)
        if splits_tokens(self):
            raise UnsupportedModelError(
                f"{state.path}: context parallelism splits tokens inside the graph of this block, and "
                "what is cached between calls is for the part of each device; leave the model uncompiled, or "
                "take reuse.every=1, plans.every=1, plans.blocks=False, plans.guidance=False, "
                "features='input', and no patch.record_steps()"
            )
        _count_call(state)
        block, call = state.threads.value, HostCall(graph, names(), args, kwargs)

        def run_graph() -> Any:
            outside = _plans_outside(state)
            block.known = _active_call(state, call) if outside else None
            block.counted = True
            try:
                return graph(*args, **kwargs)
            finally:
                block.known, block.counted = None, False

        return _with_caches(state, call, run_graph)

    def get(self: nn.Module) -> Callable | None:
        graph = self.__dict__.get(COMPILED)
        return None if graph is None else functools.partial(call_graph, self, graph)

    def put(self: nn.Module, graph: Callable | None) -> None:
        self.__dict__[COMPILED] = graph

    return property(get, put)


def stage_call(original: HostMethod) -> Callable:
    """A stage of a UNet, which is skipped on some steps: then its extrapolated result takes its place."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: StageState | None = self.__dict__.get(STATE)
        if state is None or not state.model.context.caches_residuals:
            return original.of(self)(*args, **kwargs)
        call, distance, cache = (state.model.context.call, 0), state.extrapolation, state.threads.value.cache
        before, placeholder = cache.residuals.get(call), cache.placeholders.get(call)
        if distance is not None and before is not None:
            return extrapolated(before, [0.0], distance)
        if distance is not None and placeholder is not None:
            return tree_map(torch.zeros_like, placeholder)  # read by modules that are skipped too
        result = original.of(self)(*args, **kwargs)
        if state.is_last:
            cache.residuals[call] = updated(before, residual_of(result, [0.0]))
        else:
            cache.placeholders[call] = tree_map(
                lambda tensor: tensor.new_zeros(()).expand(tensor.shape), result
            )
        return result

    return forward


def layer_call(original: HostMethod) -> Callable:
    """Attention or feed-forward: runs on merged tokens."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: LayerState | None = self.__dict__.get(STATE)
        active = None if state is None else state.block.threads.value.merge
        if state is None or active is None:
            return original.of(self)(*args, **kwargs)
        call = HostCall(original.of(self), original.names(), args, kwargs)
        settings = state.block.settings
        if state.threads.value.cache.dense or not _merges_here(state, settings, active, call):
            return call.result()
        plan = active.plan
        if settings.scope == "block":
            with _proportional(state, settings, plan):
                return call.result()

        def merged(plan: Plan) -> Any:
            combine = COMBINE[settings.combine]
            with _proportional(state, settings, plan):
                if settings.scope == "keys" and state.keys is not None:
                    _check_keys(self, state)
                    return keyed_call(call, state.layout, plan, state.keys, combine)
                return merged_call(call, state.layout, plan, combine)

        residuals, number = state.threads.value.cache.residuals, state.block.call
        before = residuals.get(number)
        result = _corrected(settings, plan, before, state.layout, call.result, merged)
        if before is not None or state.block.model.context.corrects:  # from a correction step on
            nothing = [0.0] * (1 if isinstance(result, Tensor) else len(result))
            residuals[number] = of_image(state.layout, residual_of(result, nothing), active.tokens)
        return result

    return forward


def _merges_here(state: LayerState, settings: MergeSettings, active: ActiveMerge, call: HostCall) -> bool:
    """Whether a layer's call takes part in what its block merges."""
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


def _block_with_gradients(state: BlockState, call: HostCall) -> Any:
    """The result of a block under gradients. When checkpointing runs it again, it merges by the same plan."""
    block = state.threads.value
    if block.known is None:
        block.known = state.calls.get(state.layout.tokens_of(call))
    try:
        return _block(state, call)
    finally:
        block.known = None


def _with_caches(state: BlockState, call: HostCall, run: Callable[[], Any]) -> Any:
    """The result of a block, which ``run`` returns where the block is not skipped.

    What the block added is cached where a plan of a later step needs it.
    """
    context = state.model.context
    if caches_features(state, context):
        run = functools.partial(with_cached_features, state, call, sequence_in(state).tokens, run)
    return block_in_run(state, call, run) if _is_skipped(state, context) else run()


def _is_skipped(state: BlockState, context: CallContext) -> bool:
    """Whether a block is one of those that are skipped on some steps of the running generation."""
    return state.caches_residuals and context.caches_residuals


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
            known = _active_call(state, call)
            if records:
                state.calls[state.layout.tokens_of(call)] = known
        block.merge = active = known.merge
        if block_layout is None or active is None:
            return call.result()

        def merged(plan: Plan) -> Any:
            return merged_call(call, block_layout, plan, COMBINE[settings.combine], change_only=True)

        residuals = block.cache.residuals
        # What is cached for other purposes is not read here, because that would take another graph.
        before = residuals.get(state.call) if context.config.correction.on else None
        result = _corrected(settings, active.plan, before, block_layout, call.result, merged)
        if before is not None or context.corrects:  # from a correction step on
            bases = _bases(state, call, 1 if isinstance(result, Tensor) else len(result))
            residuals[state.call] = of_image(block_layout, residual_of(result, bases), active.tokens)
        return result
    finally:
        block.merge = None


def _active_call(state: BlockState, call: HostCall) -> RecordedCall:
    """Find out what the running call of a block merges."""
    layout, context = state.layout, state.model.context
    tokens = layout.tokens_of(call)
    mask = call.argument(layout.padding) if layout.padding else None
    found = pictures_to_merge(state, tokens)
    if found is None or state.threads.value.cache.dense:
        return RecordedCall(state.settings, None)
    pictures, n = found
    plan = None if context.corrects else plan_of(state, context, pictures, n, tokens, mask)
    padded = n if mask is None else tokens.shape[1]
    return RecordedCall(state.settings, ActiveMerge(tokens.shape[0], padded, plan))


def _plans_outside(state: BlockState) -> bool:
    """Whether the next call of a compiled block takes its plan as an input of the graph.

    A plan that serves one call is better made in the graph, where its operations are fused. A plan that the
    step log counts has to be made outside.
    """
    settings, context = state.settings, state.model.context
    reads_cache = settings.features in CACHED_FEATURES  # what is cached is read outside the graph
    return context.caches_plans or context.step_log is not None or reads_cache


def _count_call(state: BlockState) -> None:
    """Number the running call of a block. With gradients the number is 0, since the call may run again."""
    block = state.threads.value
    block.number = 0 if torch.is_grad_enabled() else block.number + 1


def _corrected(
    settings: MergeSettings,
    plan: Plan | None,
    before: Residual | None,
    layout: Layout,
    dense: Callable[[], Any],
    merged: Callable[[Plan], Any],
) -> Any:
    """The result of a block or layer: exact on correction steps, else merged and corrected.

    Correcting adds back the detail lost by merging. The plan is None on a correction step. ``before`` is the
    residual of the block, or of its layer, from the last correction step; None: there was none. ``dense``
    returns the exact result, and ``merged`` the result on merged tokens for a plan.
    """
    if plan is None:
        return dense()
    if before is None:
        return merged(plan)
    return add_lost(layout, plan, merged(plan), before.latest, COMBINE[settings.combine])


def _bases(state: BlockState, call: HostCall, count: int) -> list[Tensor]:
    """What a block adds its residual to: its tokens or text, for each of ``count`` tensors of its result."""
    assert state.block_layout is not None
    tokens = state.layout.tokens_of(call)
    if count == 1:
        return [tokens]
    text = call.argument("encoder_hidden_states")
    return [tokens if i in state.block_layout.outputs else text for i in range(count)]


def _proportional(
    state: LayerState, settings: MergeSettings, plan: Plan | None
) -> AbstractContextManager[Any]:
    if plan is not None and settings.proportional and state.kind == "attn1" and state.own_keys:
        return ProportionalAttention(plan, state.layout, state.block)
    return nullcontext()


def _check_keys(attention: nn.Module, state: LayerState) -> None:
    if getattr(attention, "fused_projections", False):
        raise UnsupportedModelError(
            f"{state.path}: scope='keys' needs keys and values projected apart from the queries, and "
            "they are fused; call unfuse_qkv_projections(), or take scope='layers'"
        )
