"""Stacks of blocks: the first merges, the last unmerges, and all run on merged tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.call import HostCall
from tokenmerge.models.layout import Layout
from tokenmerge.ops import Plan
from tokenmerge.runtime.context import ActiveMerge
from tokenmerge.runtime.merged_call import call_on, merged_tokens, of_image, unmerged_result
from tokenmerge.runtime.planning import pictures_to_merge, plan_of, record_plan, sequence_in
from tokenmerge.runtime.reuse import residual_of
from tokenmerge.runtime.state import BlockState, StackInput
from tokenmerge.runtime.token_reuse import cached_anew, refilled_result


def call_in_stack(call: HostCall, state: BlockState, combine: Callable[[Plan, Tensor], Tensor]) -> Any:
    """The result of a block: h + U (f_k … f_1 (M h) − M h) over its stack, with merging M and unmerging U.

    With token-wise reuse, tokens that are not computed get a residual of the whole stack, which its last
    block caches. The first block gets all tokens, the others merged ones. Arguments with an entry for each
    token are for all tokens in every block. The last block returns its result for all tokens, the others for
    merged ones.
    """
    role, layout = state.stack, state.block_layout
    if role is None or layout is None:
        return call.result()
    stack, block, context = role.threads.value, state.threads.value, state.model.context
    tokens = layout.tokens_of(call)
    if role.is_first:
        stack.input = None  # of a call that was interrupted
    if stack.input is None:
        found = pictures_to_merge(state, state.settings, tokens)
        if found is None or call.has(layout.dense_if) or not role.is_first:
            return call.result()
        plan = None if context.corrects else plan_of(state, context, *found, tokens, None)
        merged = tokens if plan is None else merged_tokens(layout, plan, tokens, combine)
        stack.input = StackInput(plan, tokens, merged)
    else:
        plan, merged = stack.input.plan, tokens
        _check_comes_from_before(state, tokens, merged=stack.input.merged)
        if plan is not None:
            record_plan(state, context, plan)
    if plan is None:
        result = call.result()
    else:
        images, n = plan.inverse.shape
        block.merge = ActiveMerge(images, n, plan)
        try:
            result = call_on(call, layout, plan, merged)
        finally:
            block.merge = None
    if not role.is_last:
        return result
    whole, stack.input = stack.input, None
    return _for_all_tokens(state, layout, whole, result)


def _for_all_tokens(state: BlockState, layout: Layout, whole: StackInput, result: Any) -> Any:
    """What the last block of a stack returns: its result for all tokens."""
    settings, plan, change = state.settings, whole.plan, (whole.tokens, whole.merged)
    if not settings.reuses_tokens:
        assert plan is not None
        return unmerged_result(layout, plan, result, change)
    cached, distance = state.threads.value.cache.tokens, state.model.context.token_distance
    before = cached.get(state.call)
    if plan is not None:
        result, cached[state.call] = refilled_result(layout, plan, result, change, before, settings, distance)
        return result
    outputs = [result] if isinstance(result, Tensor) else result
    bases = [whole.tokens if len(outputs) == 1 or i in layout.outputs else 0.0 for i in range(len(outputs))]
    residual = of_image(layout, residual_of(result, bases), sequence_in(state).tokens)
    cached[state.call] = cached_anew(before, residual, settings, state.model.threads.value.part)
    return result


def _check_comes_from_before(state: BlockState, tokens: Tensor, merged: Tensor) -> None:
    """Refuse tokens that are not the result of the block before it in the stack."""
    if tokens.shape != merged.shape:
        raise UnsupportedModelError(
            f"{state.path}: expected the {merged.shape[1]} merged tokens of the block before it in its "
            f"stack, got an input of shape {tuple(tokens.shape)}; where blocks are left out, or something "
            "changes tokens between them, take scope='block', with plans.blocks=True for one plan"
        )
