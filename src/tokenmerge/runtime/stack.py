"""Stacks of blocks: the first merges, the last unmerges, and all run on merged tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.call import HostCall
from tokenmerge.ops import Plan
from tokenmerge.runtime.context import ActiveMerge
from tokenmerge.runtime.merged_call import call_on, merged_tokens, unmerged_result
from tokenmerge.runtime.planning import pictures_to_merge, plan_of, record_plan
from tokenmerge.runtime.state import BlockState, StackInput


def call_in_stack(call: HostCall, state: BlockState, combine: Callable[[Plan, Tensor], Tensor]) -> Any:
    """The result of a block: h + U (f_k … f_1 (M h) − M h) over its stack, with merging M and unmerging U.

    The first block gets all tokens, the others merged ones. Arguments with an entry for each token are for
    all tokens in every block. The last block returns its result for all tokens, the others for merged ones.
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
        plan = plan_of(state, context, *found, tokens, None)
        merged = merged_tokens(layout, plan, tokens, combine)
        stack.input = StackInput(plan, tokens, merged)
    else:
        plan, merged = stack.input.plan, tokens
        _check_comes_from_before(state, tokens, merged=stack.input.merged)
        record_plan(state, context, plan)
    images, n = plan.inverse.shape
    block.merge = ActiveMerge(images, n, plan)
    try:
        result = call_on(call, layout, plan, merged)
    finally:
        block.merge = None
    if not role.is_last:
        return result
    whole, stack.input = stack.input, None
    return unmerged_result(layout, plan, result, (whole.tokens, whole.merged))


def _check_comes_from_before(state: BlockState, tokens: Tensor, merged: Tensor) -> None:
    """Refuse tokens that are not the result of the block before it in the stack."""
    if tokens.shape != merged.shape:
        raise UnsupportedModelError(
            f"{state.path}: expected the {merged.shape[1]} merged tokens of the block before it in its "
            f"stack, got an input of shape {tuple(tokens.shape)}; where blocks are left out, or something "
            "changes tokens between them, take scope='block', with plans.blocks=True for one plan"
        )
