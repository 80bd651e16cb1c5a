"""Correction: blocks and layers add back what merging loses, as a correction step has measured it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from tokenmerge.models.call import HostCall
from tokenmerge.models.layout import Layout
from tokenmerge.ops import Plan
from tokenmerge.runtime.blocks.merged_call import Combine, add_lost, of_image
from tokenmerge.runtime.memory.caches import Call
from tokenmerge.runtime.memory.context import ActiveMerge
from tokenmerge.runtime.memory.reuse import Residual, residual_of
from tokenmerge.runtime.memory.state import BlockState


def corrected(
    residuals: dict[Call, Residual],
    number: Call,
    active: ActiveMerge,
    layout: Layout,
    combine: Combine,
    dense: Callable[[], Any],
    merged: Callable[[Plan], Any],
    bases: Callable[[int], Sequence[Any]],
) -> Any:
    """Return the result of a block or layer: exact where it is measured what merging loses, else corrected.

    Args:
        residuals: of the block or layer, by call; the new one is cached.
        number: the running call.
        active: what merges in it; without a plan, the call is dense and measures.
        layout: of the tokens.
        combine: makes merged tokens from (plan, tokens).
        dense: returns the exact result.
        merged: returns the result on merged tokens for a plan.
        bases: returns what each tensor of the result is added to, for the number of these tensors.
    """
    before, plan = residuals.get(number), active.plan
    if plan is None:
        result = dense()
    elif before is None:
        result = merged(plan)
    else:
        result = add_lost(layout, plan, merged(plan), before.latest, combine)
    if plan is None or before is not None:
        added = residual_of(result, bases(1 if isinstance(result, Tensor) else len(result)))
        residuals[number] = of_image(layout, added, active.tokens)
    return result


def inputs_of(state: BlockState, call: HostCall, count: int) -> list[Tensor]:
    """Return what a block adds to: its tokens or text, for each of ``count`` tensors of its result."""
    assert state.block_layout is not None
    tokens = state.layout.tokens_of(call)
    if count == 1:
        return [tokens]
    text = call.argument("encoder_hidden_states")
    return [tokens if i in state.block_layout.outputs else text for i in range(count)]
