"""Stacks of blocks: the first merges, the last unmerges, and all run on merged tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.call import HostCall
from tokenmerge.ops import Plan
from tokenmerge.runtime.caches import Inside
from tokenmerge.runtime.merged_call import call_on, merged_tokens, unmerged_result
from tokenmerge.runtime.planning import note_plan, plan_of, size_of
from tokenmerge.runtime.state import BlockState

__all__ = ["call_in_stack"]


def call_in_stack(call: HostCall, state: BlockState, combine: Callable[[Plan, Tensor], Tensor]) -> Any:
    """The result of a block: h + U (f_k … f_1 (M h) − M h) over its stack, with merging M and unmerging U.

    Args:
        call: of the block; with all tokens for the first, with merged ones for the others, but what follows
            the tokens is for all of them in each.
        state: of the block.
        combine: (plan, tokens) → merged tokens.

    Returns:
        What the block returns: for all tokens of the last block, for merged ones of the others.
    """
    stack, layout = state.stack, state.wide
    if stack is None or layout is None:
        return call.result()
    tokens = layout.tokens_of(call)
    if state.is_first:
        stack.inside = None  # of a call that was broken off
    if stack.inside is None:
        merges = size_of(state, tokens, None) is not None and not call.has(layout.whole)
        if not (merges and state.is_first):
            return call.result()
        plan = plan_of(state, tokens, None)
        merged = merged_tokens(layout, plan, tokens, combine)
        stack.inside = Inside(plan, tokens, merged)
    else:
        plan, merged = stack.inside.plan, tokens
        _check_comes_from_before(state, tokens, merged=stack.inside.merged)
        note_plan(state, plan)
    images, n = plan.inverse.shape
    state.size, state.plan = (images, n), plan
    try:
        result = call_on(call, layout, plan, merged)
    finally:
        state.size = state.plan = None
    if not state.is_last:
        return result
    inside, stack.inside = stack.inside, None
    return unmerged_result(layout, plan, result, (inside.tokens, inside.merged))


def _check_comes_from_before(state: BlockState, tokens: Tensor, merged: Tensor) -> None:
    """Refuse tokens that the block before it in the stack has not returned."""
    if tokens.shape != merged.shape:
        raise UnsupportedModelError(
            f"{state.path}: expected {merged.shape[1]} tokens, merged, of the block before it in its stack, "
            f"got an input of shape {tuple(tokens.shape)}; where blocks are left out, or something changes "
            "tokens between them, take scope='block', with plans.blocks=True for one plan"
        )
