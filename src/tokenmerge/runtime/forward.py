"""What the methods of a patched model do: merge, call the host's own method, unmerge."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.call import HostCall
from tokenmerge.models.layout import Layout
from tokenmerge.ops import Plan, keep_destinations, merge, merge_with_norm
from tokenmerge.runtime.caches import Change, Seen, change_of, changed, since
from tokenmerge.runtime.merged_call import add_lost, keyed_call, merged_call
from tokenmerge.runtime.planning import plan_of, size_of
from tokenmerge.runtime.proportional_attention import ProportionalAttention
from tokenmerge.runtime.stack import call_in_stack
from tokenmerge.runtime.state import STATE, BlockState, LayerState, StageState

__all__ = ["COMPILED", "block_call", "compiled_block", "layer_call", "parameters", "stage_call"]

# Where ``nn.Module.compile`` leaves what a module runs instead of its ``forward``.
COMPILED = "_compiled_call_impl"
COMBINE = {"mean": merge, "keep": keep_destinations, "norm": merge_with_norm}

# These functions make the method of a swapped class from the method of the original one, taken as a plain
# function, which torch.compile can follow. A module that is called through a reference to this method after
# it was restored has no state and does what it did before.


def block_call(original: Callable) -> Callable:
    """The transformer block: plans from its input, for itself or for its sub-layers."""
    names = parameters(original)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: BlockState | None = self.__dict__.get(STATE)
        if state is None:
            return original(self, *args, **kwargs)
        if state.settled is None:
            _count_call(state)
        call = HostCall(functools.partial(original, self), names, args, kwargs)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _block_with_gradients(state, call)
        return _reused_block(state, call) if state.keeps else _block(state, call)

    return _with_own_code(forward)


def compiled_block(names: Sequence[str]) -> property:
    """The attribute in which a block that is compiled alone has its graph; the graph is called with a plan.

    If other calls use the plan too, it is an input of the graph: a graph that makes a plan and a graph that
    takes one from another call would be two.

    Args:
        names: of the parameters of the block's ``forward``, in order.
    """

    def call_graph(self: nn.Module, graph: Callable, *args: Any, **kwargs: Any) -> Any:
        state: BlockState | None = self.__dict__.get(STATE)
        if state is None or torch.compiler.is_compiling() or not _plans_ahead(state):
            return graph(*args, **kwargs)
        _count_call(state)
        state.settled = _settle(state, HostCall(graph, names, args, kwargs))
        try:
            return graph(*args, **kwargs)
        finally:
            state.settled = None

    def get(self: nn.Module) -> Callable | None:
        graph = self.__dict__.get(COMPILED)
        return None if graph is None else functools.partial(call_graph, self, graph)

    def put(self: nn.Module, graph: Callable | None) -> None:
        self.__dict__[COMPILED] = graph

    return property(get, put)


def stage_call(original: Callable) -> Callable:
    """A part of a UNet: on some steps only its result goes on, and nothing runs."""

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: StageState | None = self.__dict__.get(STATE)
        if state is None or not state.run.keeps:
            return original(self, *args, **kwargs)
        call, ahead = (state.run.turns.number, 0), state.ahead
        before, shape = state.changes.get(call), state.shapes.get(call)
        if ahead is not None and before is not None:
            return changed(before, [0.0], ahead)
        if ahead is not None and shape is not None:
            return tree_map(torch.zeros_like, shape)  # for others that do not run either
        result = original(self, *args, **kwargs)
        if state.is_last:
            state.changes[call] = since(before, change_of(result, [0.0]))
        else:
            state.shapes[call] = tree_map(lambda tensor: tensor.new_zeros(()).expand(tensor.shape), result)
        return result

    return _with_own_code(forward)


def layer_call(original: Callable) -> Callable:
    """Attention or feed-forward: runs on merged tokens."""
    names = parameters(original)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: LayerState | None = self.__dict__.get(STATE)
        if state is None or state.block.size is None:
            return original(self, *args, **kwargs)
        settings, plan, size = state.block.settings, state.block.plan, state.block.size
        wide = settings.whole_blocks
        takes_part = (
            state.keys is not None if settings.scope == "keys" else state.kind in settings.merged_layers
        )
        call = HostCall(functools.partial(original, self), names, args, kwargs)
        tokens = call.argument(names[0])
        # Parts of the sequence, as in feed-forward chunking, do not fit the plan.
        fits = _fits(tokens, *(plan.keep.shape if wide and plan is not None else size))
        if not (wide or takes_part) or not fits or call.has(state.layout.whole):
            return call.result()
        if wide:
            with _proportional(state, plan):
                return call.result()

        def merged(plan: Plan) -> Any:
            combine = COMBINE[settings.combine]
            with _proportional(state, plan):
                if settings.scope == "keys" and state.keys is not None:
                    _check_keys(self, state)
                    return keyed_call(call, state.layout, plan, state.keys, combine)
                return merged_call(call, state.layout, plan, combine)

        before = state.changes.get(state.block.call)
        result = _corrected(state.block, before, state.layout, call.result, merged)
        if _keeps_change(state.block, before):
            nothing = [0.0] * (1 if isinstance(result, Tensor) else len(result))
            state.changes[state.block.call] = change_of(result, nothing)
        return result

    return _with_own_code(forward)


def _block_with_gradients(state: BlockState, call: HostCall) -> Any:
    """The result of a block that gradient checkpointing may run once more: then it merges what it merged."""
    state.settled = state.seen.get(state.layout.tokens_of(call))
    try:
        return _block(state, call)
    finally:
        state.settled = None


def _reused_block(state: BlockState, call: HostCall) -> Any:
    """The result of a block that on some steps does not run: what it changed before goes on."""
    before = state.changes.get(state.call)
    if state.run.ahead is not None and before is not None:
        return changed(before, _bases(state, call, len(before.latest)), state.run.ahead)
    result = _block(state, call)
    state.changes[state.call] = since(before, _change(state, call, result))
    return result


def _block(state: BlockState, call: HostCall) -> Any:
    """The result of a block that runs: itself on merged tokens, or its layers, or what it is a stack with."""
    combine = COMBINE[state.settings.combine]
    if state.settings.scope == "stack":
        return call_in_stack(call, state, combine)
    wide = state.wide if state.settings.scope == "block" else None
    if state.settings.scope == "block" and (wide is None or call.has(wide.whole)):
        return call.result()
    try:
        settled = state.settled
        if settled is None:
            settled = _settle(state, call)
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                state.seen[state.layout.tokens_of(call)] = settled
        _, state.size, state.plan = settled
        if wide is None or state.size is None:
            return call.result()

        def merged(plan: Plan) -> Any:
            return merged_call(call, wide, plan, combine, change_only=True)

        before = state.changes.get(state.call)
        result = _corrected(state, before, wide, call.result, merged)
        if _keeps_change(state, before) and not state.keeps:
            state.changes[state.call] = _change(state, call, result)
        return result
    finally:
        state.size = state.plan = None


def _settle(state: BlockState, call: HostCall) -> Seen:
    """What the running call of a block runs with: no plan where nothing merges, or where it is dense."""
    tokens = state.layout.tokens_of(call)
    mask = call.argument(state.layout.padding) if state.layout.padding else None
    size = size_of(state, tokens, mask)
    merges = size is not None and not state.run.corrects
    return Seen(state.settings, size, plan_of(state, tokens, mask) if merges else None)


def _plans_ahead(state: BlockState) -> bool:
    """Whether the next call of a compiled block takes its plan as an input of the graph.

    A plan that serves one call is better made in the graph, where its operations are fused. In a stack the
    first block plans, in its graph.
    """
    reused = state.keeps and state.run.ahead is not None
    return state.run.holds and not reused and state.settings.scope != "stack"


def _count_call(state: BlockState) -> None:
    # With gradients, it may run once more behind the model, as in the same call.
    state.number = 0 if torch.is_grad_enabled() else state.number + 1


def _change(state: BlockState, call: HostCall, result: Any) -> Change:
    """What a block has added to what it was called with."""
    return change_of(result, _bases(state, call, 1 if isinstance(result, Tensor) else len(result)))


def _corrected(
    block: BlockState,
    before: Change | None,
    layout: Layout,
    dense: Callable[[], Any],
    merged: Callable[[Plan], Any],
) -> Any:
    """The result of a block or layer: on dense steps exact, on others merged, with what merging loses.

    Args:
        block: that runs.
        before: what it, or its layer, changed when it last ran; None: nothing is known.
        layout: of its tokens.
        dense: → the exact result.
        merged: plan → the result on merged tokens.
    """
    plan = block.plan
    if plan is None:
        return dense()
    if before is None or not block.run.config.correct_every:
        return merged(plan)
    return add_lost(layout, plan, merged(plan), before.latest, COMBINE[block.settings.combine])


def _keeps_change(block: BlockState, before: Change | None) -> bool:
    """Whether what a block or layer changes is kept, for corrections: from a dense step on."""
    run = block.run
    return run.corrects or (before is not None and bool(run.config.correct_every))


def _bases(state: BlockState, call: HostCall, count: int) -> list[Tensor]:
    """What a block adds its change to: its tokens or text, for each of ``count`` tensors of its result."""
    assert state.wide is not None
    tokens = state.layout.tokens_of(call)
    if count == 1:
        return [tokens]
    text = call.argument("encoder_hidden_states")
    return [tokens if i in state.wide.outputs else text for i in range(count)]


def _proportional(state: LayerState, plan: Plan | None) -> AbstractContextManager[Any]:
    if plan is not None and state.block.settings.proportional and state.kind == "attn1" and state.own_keys:
        return ProportionalAttention(plan, state.layout, state.block)
    return nullcontext()


def _check_keys(attention: nn.Module, state: LayerState) -> None:
    if getattr(attention, "fused_projections", False):
        raise UnsupportedModelError(
            f"{state.block.path}: scope='keys' needs keys and values projected apart from the queries, and "
            "they are fused; call unfuse_qkv_projections(), or take scope='layers'"
        )


def _with_own_code(function: Any) -> Callable:
    """Give a method a code object of its own; torch.compile counts the graphs of each, and limits them."""
    function.__code__ = function.__code__.replace()
    return function


def parameters(function: Callable) -> list[str]:
    """Names of a method's parameters after ``self``."""
    return list(inspect.signature(function).parameters)[1:]


def _fits(x: Tensor, images: int, tokens: int) -> bool:
    return x.shape[0] == images and x.shape[1] >= tokens
