"""Patches of the attention of UNets. They have no state: all of it is in the running step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from tokenmerge.integrations.comfyui.sampling import Running, Step, prompts_in, step_in
from tokenmerge.models.base import PLAIN
from tokenmerge.ops import unmerge
from tokenmerge.plans.generation import Merging
from tokenmerge.runtime.blocks.merged_call import COMBINE, add_lost
from tokenmerge.runtime.memory.reuse import residual_of


def before_attention(n: Tensor, context: Any, value: Any, options: dict[str, Any]) -> tuple[Any, Any, Any]:
    """``attn1_patch``: plan from the normalised tokens of the block, and merge them for self-attention."""
    step = step_in(options)
    if step is None:
        return n, context, value
    step.running = running = _running(step, n, options)
    settings = None if running is None else running.settings
    if running is None or settings is None or not (settings.scope == "keys" or settings.merge_attn):
        return n, context, value
    if settings.scope == "layers":
        running.merged = "attn1"
    if running.plan is None:
        return n, context, value
    merged = COMBINE[settings.combine](running.plan, n)
    own = context is n  # otherwise another node has changed the keys
    running.weighs = own and settings.proportional
    if settings.scope == "keys":
        return (n, merged, merged) if own else (n, context, value)
    return (merged, merged, merged) if own else (merged, context, value)


def before_cross_attention(
    n: Tensor, context: Any, value: Any, options: dict[str, Any]
) -> tuple[Any, Any, Any]:
    """``attn2_patch``: merge the queries of cross-attention."""
    step = step_in(options)
    running = None if step is None else step.running
    if running is None or running.settings.scope == "keys" or not running.settings.merge_crossattn:
        return n, context, value
    if step is not None and step.is_replaced("attn2", running.block):
        return n, context, value
    running.merged, running.weighs = "attn2", False
    if running.plan is None:
        return n, context, value
    return COMBINE[running.settings.combine](running.plan, n), context, value


def after_attention(n: Tensor, options: dict[str, Any]) -> Tensor:
    """``attn1_output_patch`` and ``attn2_output_patch``: give each token the result of its merged token."""
    step = step_in(options)
    running = None if step is None else step.running
    if step is None or running is None or running.merged is None:
        return n
    layer, running.merged, running.weighs = (running.block, running.merged), None, False
    plan, sampling = running.plan, step.sampling
    if plan is None:
        sampling.keep(layer, residual_of(n, [0.0]))
        return n
    result, lost = unmerge(plan, n), sampling.of(layer)
    # A node that scales the deep levels changes their size during a sampling.
    if lost is not None and getattr(lost.latest[0], "shape", None) == result.shape:
        combine = COMBINE[running.settings.combine]
        result = add_lost(PLAIN, plan, result, lost.latest, combine)
        sampling.keep(layer, residual_of(result, [0.0]))
    return result


def innermost(patches: Mapping[str, Any]) -> dict[str, list[Callable[..., Any]]]:
    """Return a UNet's patches with those of this node next to the layers.

    Whatever the order of the nodes, the patches of others get all tokens then.
    """
    result = {name: list(present) for name, present in patches.items()}
    for name, own in PATCHES.items():
        others = [patch for patch in result.get(name, ()) if patch is not own]
        result[name] = [own, *others] if name.endswith("output_patch") else [*others, own]
    return result


def _running(step: Step, n: Tensor, options: dict[str, Any]) -> Running | None:
    """Return what the block merges; None: it is dense."""
    batch, _, rows, columns = options["activations_shape"]
    way, number = options["block"]
    block = way, number, options.get("block_index", 0)
    if n.shape[:2] != (batch, rows * columns):
        if step.settings.regroup:
            step.sampling.say(step.settings.regrouped)
        return None
    if step.is_replaced("attn1", block):
        return None
    level = level_of(options["original_shape"][-2], rows)
    if not step.merges((1, rows, columns), level):
        return None
    plan = None
    if step.sampling.decision.merging is not Merging.MEASURES:
        place = (level, way) if step.settings.config.plans.blocks else block
        plan = step.plan(place, n, (1, rows, columns), level, prompts_in(options))
    return Running(plan, step.at(level), block=block)


def level_of(finest: int, rows: int) -> int:
    """Return the level with this number of rows. Levels halve rows, rounding up.

    >>> [level_of(9, rows) for rows in (9, 5, 3, 2)]
    [1, 2, 4, 8]
    """
    level = 1
    while finest > rows:
        finest, level = -(-finest // 2), 2 * level
    return level


PATCHES: Mapping[str, Callable[..., Any]] = {
    "attn1_patch": before_attention,
    "attn1_output_patch": after_attention,
    "attn2_patch": before_cross_attention,
    "attn2_output_patch": after_attention,
}
