"""Patches of the attention of UNets, and steps that skip their deep stages, or the finest level too.

The patches have no state: all of it is in the running sampling. A step that skips stages calls ComfyUI's own
forward on a view of the UNet, in which the skipped blocks do nothing; no module changes. What they would have
returned is extrapolated from steps that ran them (DeepCache: arXiv 2312.00858; TaylorSeer: 2503.06923).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from tokenmerge.integrations.comfyui.models import Cut
from tokenmerge.integrations.comfyui.sampling import Options, Running, Sampling, running_in, sampling_in
from tokenmerge.models.base import PLAIN
from tokenmerge.plans.generation import StepKind
from tokenmerge.runtime.blocks.merged_call import add_lost, combined
from tokenmerge.runtime.memory.caches import extrapolated, updated

# ComfyUI's patches that get what a block of the UNet returned.
_AFTER_BLOCKS = ("input_block_patch", "input_block_patch_after_skip", "output_block_patch")
# The parts whose results are cached, as the decision of a call names them.
_DEEP = "deep"
_FINEST = "finest"


def before_attention(n: Tensor, context: Any, value: Any, options: Options) -> tuple[Any, Any, Any]:
    """``attn1_patch``: plan from the normalised tokens of the block, and merge them for self-attention."""
    sampling = sampling_in(options)
    if sampling is None:
        return n, context, value
    running = _running(sampling, n, options)
    sampling.running = running
    keys_alone = running is not None and running.settings.scope == "keys"
    if running is None or not (keys_alone or running.settings.merge_attn):
        return n, context, value
    if not keys_alone:
        running.merged = "attn1"
    if running.plan is None:
        return n, context, value
    merged = combined(running.plan, n, running.settings.combine)
    if context is n:  # otherwise another node has changed the keys
        running.weighs = running.settings.proportional
        context = merged
        value = merged
    return n if keys_alone else merged, context, value


def before_cross_attention(n: Tensor, context: Any, value: Any, options: Options) -> tuple[Any, Any, Any]:
    """``attn2_patch``: merge the queries of cross-attention."""
    sampling, running = running_in(options)
    if running is None or running.settings.scope == "keys" or not running.settings.merge_crossattn:
        return n, context, value
    if sampling.is_replaced("attn2", running.block):
        return n, context, value
    running.merged = "attn2"
    running.weighs = False
    if running.plan is None:
        return n, context, value
    return combined(running.plan, n, running.settings.combine), context, value


def after_attention(n: Tensor, options: Options) -> Tensor:
    """``attn1_output_patch`` and ``attn2_output_patch``: give each token the result of its merged token."""
    sampling, running = running_in(options)
    if running is None or running.merged is None:
        return n
    layer = (running.block, running.merged)
    running.merged = None
    running.weighs = False
    plan = running.plan
    if plan is None:
        sampling.keep(layer, (n.clone(),))
        return n
    result = plan.unmerge(n)
    lost = sampling.of(layer)
    # A node that scales the deep levels changes their size during a sampling.
    if lost is not None and lost[0].shape == result.shape:
        result = add_lost(PLAIN, plan, result, lost, running.settings.combine)
        sampling.keep(layer, (result.clone(),))
    return result


def with_patches(others: Mapping[str, Any]) -> dict[str, list[Callable[..., Any]]]:
    """Return the patches of other nodes with those above next to the layers: the others get all tokens."""
    return {
        **others,
        "attn1_patch": [*others.get("attn1_patch", ()), before_attention],
        "attn1_output_patch": [after_attention, *others.get("attn1_output_patch", ())],
        "attn2_patch": [*others.get("attn2_patch", ()), before_cross_attention],
        "attn2_output_patch": [after_attention, *others.get("attn2_output_patch", ())],
    }


def _running(sampling: Sampling, n: Tensor, options: Options) -> Running | None:
    """Return what the block merges, or None if it is dense."""
    batch, _, rows, columns = options["activations_shape"]
    way, number = options["block"]
    block = way, number, options.get("block_index", 0)
    if n.shape[:2] != (batch, rows * columns):
        if sampling.settings.regroup:
            sampling.say(sampling.settings.regrouped)
        return None
    if sampling.is_replaced("attn1", block):
        return None
    level = 1
    while -(-options["original_shape"][-2] // level) > rows:  # each level halves the rows, rounding up
        level *= 2
    return sampling.merge_in(block, (level, way), n, PLAIN, (1, rows, columns), level)


def call_stages(
    executor: Any, cut: Cut, sampling: Sampling, arguments: Sequence[Any], named: Mapping[str, Any]
) -> Any:
    """Call the UNet in ComfyUI's wrapper ``diffusion_model``, without the stages that the step skips.

    ``arguments`` are (x, timesteps, context, y, control, transformer_options).
    """
    *first, control, options = arguments
    decision = sampling.decision
    # The highest part that the running call skips, or None if all of the UNet runs.
    skipped = {StepKind.SHALLOW: _DEEP, StepKind.SKIPPED: _FINEST}.get(decision.kind)
    if skipped is not None and sampling.of(skipped) is None:
        skipped = None  # another node returned before this part ran

    def result(part: str, h: Tensor) -> Tensor:
        """Return the result of a part. It is extrapolated if the part is skipped, and otherwise cached."""
        if part == skipped:
            (h,) = extrapolated(sampling.of(part), [0.0], getattr(decision, part))
        else:
            sampling.ran.add(part)
            sampling.keep(part, updated(sampling.of(part), (h.clone(),)))
        return h

    def below_finest(h: Tensor, skip: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Cache the result of the deep stages, or extrapolate it. It is an ``output_block_patch``."""
        if options["block"][1] == cut.output:
            h = result(_DEEP, h)
            if skipped == _DEEP:
                options["transformer_index"] = cut.transformers  # GLIGEN counts transformers
        return h, skip

    patches = dict(options.get("patches", {}))
    if skipped == _DEEP:
        for name in _AFTER_BLOCKS:
            others = patches.get(name, ())
            patches[name] = [functools.partial(_where_blocks_run, cut, patch) for patch in others]
        control = _control(control, cut)
    elif skipped == _FINEST:
        control = None
    patches["output_block_patch"] = [below_finest, *patches.get("output_block_patch", ())]
    view = _View(executor.class_obj, cut, skipped)
    if sampling.settings.config.reuse.skips_finest:
        out = view.out
        view.out = lambda h: out(result(_FINEST, h))
    forward = types.MethodType(executor.original.__func__, view)
    inner = executor.new_class_executor(forward, view, executor.wrappers, executor.idx + 1)
    return inner.execute(*first, control, {**options, "patches": patches}, **named)


class _View:
    """A view of a UNet for its forward, without the blocks that a call skips."""

    def __init__(self, unet: Any, cut: Cut, skipped: str | None) -> None:
        self._unet = unet
        self.out = unet.out
        if skipped is not None:
            self.middle_block = None  # ComfyUI's forward skips it if it is None
        if skipped == _DEEP:
            nothing = (lambda x: x[:, :0],)  # no channels
            inputs = list(unet.input_blocks)
            outputs = list(unet.output_blocks)
            skipped_inputs = len(inputs) - cut.inputs
            self.input_blocks = inputs[: cut.inputs] + [nothing] * skipped_inputs
            self.output_blocks = [nothing] * cut.output + outputs[cut.output :]
        elif skipped == _FINEST:
            self.input_blocks = []
            self.output_blocks = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._unet, name)


def _where_blocks_run(cut: Cut, patch: Callable[..., Any], *values: Any) -> Any:
    """Call a patch of another node, except after skipped blocks."""
    *tensors, options = values
    if cut.runs(*options["block"]):
        return patch(*values)
    return tuple(tensors) if len(tensors) > 1 else tensors[0]


def _control(control: dict[str, Any] | None, cut: Cut) -> dict[str, Any] | None:
    """Return what a ControlNet adds to the blocks that run. The first block's value is the last one."""
    if control is None:
        return None
    kept = dict(control)
    for way in ("input", "middle", "output"):
        values = control.get(way, [])
        last = len(values) - 1
        kept[way] = [value if cut.runs(way, last - i) else None for i, value in enumerate(values)]
    return kept
