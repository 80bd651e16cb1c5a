"""What a block merges in its running call: by a cached plan, or a new one, and what new plans compare."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenmerge.config import CACHED_FEATURES, COMPARES_NOTHING, GUIDED_PLANNERS, MergeSettings
from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import Layout
from tokenmerge.models.call import HostCall
from tokenmerge.ops.matching import features_if_shared, guided_features, shared_features
from tokenmerge.ops.plan import Plan
from tokenmerge.planners import PLANNERS
from tokenmerge.planners.importance import importance_of_tokens
from tokenmerge.planners.sequences import TokenSequence, plan_pictures, sequence_of, sequence_of_part
from tokenmerge.plans.generation import Merging
from tokenmerge.runtime.memory.caches import BlockMerge
from tokenmerge.runtime.memory.state import BlockState, CallContext, RecordedPlan


def sequence_in(state: BlockState, settings: MergeSettings) -> TokenSequence:
    """Return the images in the tokens of a block: those of the sequence, or of this device's part."""
    shard = state.model.threads.value.shard
    sequence = sequence_of(state.grids, settings)
    return sequence if shard is None else sequence_of_part(sequence.pictures, shard.index, shard.parts)


def stays_dense(state: BlockState, layout: Layout, call: HostCall) -> bool:
    """Return whether an argument of a call keeps it from merging."""
    if call.has(layout.dense_if):
        return True
    if layout.batched or not call.has(layout.dense_by_image):
        return False
    return pictures_of(state.model.threads.value.context, len(layout.tokens_of(call))) > 1


def active_call(state: BlockState, call: HostCall) -> BlockMerge:
    """Find out what the running call of a block merges, and refuse an input of fewer tokens than its grid."""
    thread = state.model.threads.value
    settings = state.settings
    whole = state.block_layout
    if not state.merges or (settings.scope == "block" and (whole is None or stays_dense(state, whole, call))):
        return BlockMerge(settings)
    x = state.layout.tokens_of(call)
    sequence = sequence_in(state, settings)
    if x.shape[1] < sequence.tokens:
        shown = " + ".join(" × ".join(map(str, image.grid)) for image in sequence.pictures)
        raise UnsupportedModelError(
            f"{state.path}: expected the {shown} = {sequence.tokens} tokens of its grid, got an "
            f"input of shape {tuple(x.shape)}; this model calls its blocks in a way that tokenmerge does not "
            "know: remove_token_merging(model) restores it"
        )
    merging = thread.context.decision.merging
    if merging is Merging.DENSE or not sequence.removed or state.threads.value.cache.dense:
        return BlockMerge(settings)
    plan = None if merging is Merging.MEASURES else _plan_of(state, sequence, call, x)
    padding = state.layout.padding
    tokens = sequence.tokens if padding is None or call.argument(padding) is None else x.shape[1]
    return BlockMerge(settings, False, x.shape[0], tokens, plan)


def _plan_of(state: BlockState, sequence: TokenSequence, call: HostCall, x: Tensor) -> Plan:
    """Return the plan for a block's input ``x``, of which some tokens merge: a cached one, or a new one."""
    model = state.model
    block = state.threads.value
    layout = state.layout
    n = sequence.tokens
    context = model.threads.value.context
    start = layout.start_of(call, n) if layout.padding else None
    plans = block.cache.plans
    number = (context.plan_call, block.number)
    plan = plans.get(number) if context.caches_plans else None
    if plan is None or plan.inverse.shape != (x.shape[0], n):
        with torch.no_grad():  # gradient checkpointing does not plan again, and must save as many tensors
            image = layout.image(x, n, start)
            features = image
            settings = context.settings[state.level]
            if settings.features in CACHED_FEATURES:
                features = _compared(state, settings.features, x, image, start)
            plan = _new_plan(state, settings.planner, sequence, features, features is not image)
        if context.caches_plans:
            plans[number] = plan
    _note(state, sequence, plan)
    return plan if start is None else plan.within(start, x.shape[1])


def note_plan(state: BlockState, settings: MergeSettings) -> None:
    """Note the plan by which a block runs on merged tokens, which the first block of its stack has made."""
    context = state.model.context
    block = state.threads.value
    plan = block.cache.plans.get((context.plan_call, block.number))
    if plan is not None:
        _note(state, sequence_in(state, settings), plan)


def _note(state: BlockState, sequence: TokenSequence, plan: Plan) -> None:
    """Note a plan, if somebody records what merges."""
    model = state.model
    if model.record is not None:
        first, *others = (image.grid for image in sequence.pictures)
        model.record[state.path] = RecordedPlan(plan, first, tuple(others))
    step_log = model.context.step_log
    log = model.threads.value.memory.log
    if step_log is not None and log is not None and not torch.compiler.is_compiling():
        log.observe(step_log.note_plan, sequence.tokens, plan.keep.shape[1])


def _new_plan(
    state: BlockState, planner: str, sequence: TokenSequence, features: Tensor, are_added: bool
) -> Plan:
    """Plan for the tokens of a block: once for the copies of a sample that guidance compares.

    Where the features are what was added to each copy, what guidance makes of them is compared: that reaches
    the image. Of other features, the mean similarity in the copies counts.
    """
    context = state.model.threads.value.context
    images = len(features)
    copies = context.guidance_copies
    scale = context.guidance_scale if are_added and (context.guidance_scale or 0) > 1 else None
    repeats = 1
    compares = planner not in COMPARES_NOTHING
    if compares and context.copies_equal is not None and images % copies == 0:
        equal = context.copies_equal.to(features.device)
        if scale is not None:
            shared = guided_features(features, copies, scale).repeat(copies, 1, 1)
            features = torch.where(equal, shared, features)
        else:
            features = features_if_shared(features, copies, equal)
    elif compares:
        repeats = images // pictures_of(context, images)
        if repeats > 1 and scale is not None:
            features = guided_features(features, repeats, scale)
        elif repeats > 1:
            features = shared_features(features, repeats)
    importance = _importance(state, features) if planner in GUIDED_PLANNERS else None
    if planner in GUIDED_PLANNERS and importance is None:
        planner = "tome"
    # The seed is on the sample's device; blocks of a model on several devices may be elsewhere.
    seed = context.seed.to(features.device)
    also = () if importance is None else (importance,)
    plan = plan_pictures(PLANNERS[planner], features, sequence.pictures, seed, *also)
    return plan if repeats == 1 else plan.repeated(repeats)


def pictures_of(context: CallContext, images: int) -> int:
    """Return how many plans the images of a batch have: guidance repeats each image for as many prompts.

    Where it is unknown whether it does, each image has a plan of its own.
    """
    copies = context.guidance_copies
    return images if context.copies_equal is not None or images % copies else images // copies


def _importance(state: BlockState, features: Tensor) -> Tensor | None:
    """Return how much guidance changed each token ``[b, n]`` in the last step, or None before it is known."""
    change = state.model.context.guidance_difference
    shard = state.model.threads.value.shard
    if change is None:
        return None
    importance = importance_of_tokens(change, *state.grids)
    if importance is not None:
        if shard is not None:
            importance = importance.tensor_split(shard.parts, dim=1)[shard.index]
        if len(features) == 1:
            importance = importance.mean(dim=0, keepdim=True)
        if len(importance) == len(features):
            return importance.to(features.device)
    warnings.warn(
        f"{state.path}: planner={state.settings.planner!r} looks at what guidance changed, whose shape "
        f"{tuple(change.shape)} does not fit {len(features)} × {features.shape[1]} tokens; it plans as "
        "'tome' does",
        stacklevel=2,
    )
    return None


def _compared(state: BlockState, features: str, x: Tensor, image: Tensor, start: Tensor | None) -> Tensor:
    """Return what planners compare: what was added in the step before, or the image where that is unknown.

    ``x`` ``[b, text + n + padding, c]`` is the input of a block, and ``image`` ``[b, n, c]`` the image in it,
    which begins at ``start`` ``[b]``, or where the layout says.
    """
    # Under gradients nothing is cached, and what was cached before is not used.
    if torch.compiler.is_compiling() or (state.level, features) not in state.model.context.caches_features:
        return image
    if features == "model_residual":
        added = state.model.threads.value.memory.model_residuals.get((*state.call, state.level))
    else:
        latest = state.threads.value.cache.residuals.get(state.call)
        added = None if latest is None else latest[0 if len(latest) == 1 else state.image_place]
    if added is not None and added.shape == x.shape:
        added = state.layout.image(added, image.shape[1], start)
    return image if added is None or added.shape != image.shape else added


def caches_residual(state: BlockState) -> bool:
    """Return whether what a block adds by itself is cached, for plans of a later step."""
    return state.plans_first and (state.level, "residual") in state.model.context.caches_features


def with_cached_residual(state: BlockState, run: Callable[[HostCall], Any], call: HostCall) -> Any:
    """Return the result of a block, which ``run`` returns; cache what it adds to the image."""
    residuals = state.threads.value.cache.residuals
    before = residuals.get(state.call)
    n = sequence_in(state, state.settings).tokens
    start = state.layout.start_of(call, n)
    image = state.layout.image(state.layout.tokens_of(call), n, start)
    result = run(call)
    results, at = ((result,), 0) if isinstance(result, Tensor) else (result, state.image_place)
    made = state.layout.image(results[at], n, start)
    # What a correction has cached in this call already stays.
    if residuals.get(state.call) is before:
        residuals.pop(state.call, None)
        if made.shape == image.shape:
            added = made - image
            residuals[state.call] = tuple(added if i == at else None for i in range(len(results)))
    return result
