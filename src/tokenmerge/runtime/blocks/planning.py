"""The plan of a block for its running call: a cached one, or a new one."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmerge.config import CACHED_FEATURES, GUIDED_PLANNERS, MergeSettings
from tokenmerge.config.origin import instead, named
from tokenmerge.errors import NothingToMergeError, UnsupportedModelError
from tokenmerge.models.base import GridShape
from tokenmerge.ops import Plan, features_if_shared, shared_features
from tokenmerge.planners import (
    PLANNERS,
    Picture,
    Planner,
    TokenSequence,
    part_bounds,
    plan_pictures,
    sequence_of,
    sequence_of_part,
)
from tokenmerge.runtime.blocks.features import compared
from tokenmerge.runtime.memory.context import CallContext
from tokenmerge.runtime.memory.state import BlockState, RecordedPlan
from tokenmerge.runtime.steps.guidance import importance_of_tokens

Stages = Sequence[tuple[int, MergeSettings]]


def merges_tokens(stages: Stages, *grids: GridShape) -> bool:
    """Return whether a call with these finest grids of (frames, rows, columns) has tokens to merge."""
    return any(
        sequence_of([(f, -(-h // level), -(-w // level)) for f, h, w in grids], settings).removed > 0
        for level, settings in stages
    )


def check_grid(stages: Stages, *grids: GridShape, method: str = "") -> None:
    """Check that a call with these finest grids of (frames, rows, columns) has tokens to merge.

    The first is that of the picture being made, the others are those of reference pictures. ``method`` is the
    name of the settings, for messages.

    Raises:
        NothingToMergeError: it has none.
    """
    frames, rows, columns = grids[0]
    if not merges_tokens(stages, *grids) and any(settings.merges for _, settings in stages):
        if torch.compiler.is_compiling():  # a graph for all sizes knows no numbers
            raise NothingToMergeError(
                "nothing to merge: the sample gives too few tokens; generate a larger image, lower "
                "min_tokens, sx and sy, or raise ratio"
            )
        level, settings = next(stage for stage in stages if stage[1].merges)
        if len(grids) == 1 and not settings.ratio:
            raise NothingToMergeError(
                f"nothing to merge: reference_ratio={settings.reference_ratio:g} merges reference pictures, "
                "and there is none in the sequence; raise ratio to merge the picture that is being made"
            )
        sides = (frames, -(-rows // level), -(-columns // level))[frames == 1 :]
        over_time = f" × st={settings.st}" if settings.st > 1 else ""
        cells = f"cells of sy={settings.sy} × sx={settings.sx}{over_time}"
        fewest = f" and min_tokens={settings.min_tokens}" if settings.min_tokens else ""
        lower = [*(["min_tokens"] if fewest else []), "sx, sy and st" if over_time else "sx and sy"]
        given = named(method, f"ratio={settings.ratio:g} with {cells}{fewest}")
        own = f"lower {', '.join(lower)}, or raise ratio"
        raise NothingToMergeError(
            f"nothing to merge: the sample gives {' × '.join(map(str, sides))} tokens at level {level}, of "
            f"which {given} removes none; generate a larger image, "
            f"{'or ' if method else ''}{instead(method, own)}"
        )


def sequence_in(state: BlockState) -> TokenSequence:
    """Return the pictures in the tokens of a block: those of the sequence, or of this device's part."""
    part, sequence = state.model.threads.value.part, sequence_of(state.grids, state.settings)
    return sequence if part is None else sequence_of_part(sequence.pictures, part.index, part.parts)


def pictures_to_merge(state: BlockState, x: Tensor) -> tuple[Sequence[Picture], int] | None:
    """Return the pictures in a block's input, and the number of their tokens; None: nothing would merge.

    Raises:
        UnsupportedModelError: the input has fewer tokens than the block's grid.
    """
    pictures, n, removed = sequence_in(state)
    if x.shape[1] < n:
        shown = " + ".join(" × ".join(map(str, grid)) for grid, *_ in pictures)
        raise UnsupportedModelError(
            f"{state.path}: expected the {shown} = {n} tokens of its grid, got an "
            f"input of shape {tuple(x.shape)}; this model calls its blocks in a way that tokenmerge does not "
            "know: remove_token_merging(model) restores it"
        )
    return (pictures, n) if state.settings.merges and removed else None


def plan_of(
    state: BlockState,
    context: CallContext,
    pictures: Sequence[Picture],
    n: int,
    x: Tensor,
    mask: Tensor | None,
) -> Plan:
    """Return the plan for a block's tokens, of which some merge: a cached one, or a new one.

    Args:
        state: of the block.
        context: of the running call.
        pictures: in its input.
        n: number of their tokens.
        x: its input.
        mask: tells the tokens from padding behind them; None: there is no padding.
    """
    start = None if mask is None else mask.sum(dim=1) - n
    plans, settings = state.threads.value.cache.plans, state.settings
    plan = plans.get(state.plan_call) if context.caches_plans else None
    if plan is None or plan.inverse.shape != (x.shape[0], n):
        with torch.no_grad():  # gradient checkpointing does not plan again, and must save as many tensors
            features = state.layout.image(x, n, start)
            if settings.features in CACHED_FEATURES:
                features = compared(state, x, features, start)
            plan = _new_plan(state, context, pictures, features)
            if state.model.revise_plan is not None:
                plan = state.model.revise_plan(features, plan)
        if context.caches_plans:
            plans[state.plan_call] = plan
    _record(state, context, plan)
    return plan if start is None else plan.within(start, x.shape[1])


def _record(state: BlockState, context: CallContext, plan: Plan) -> None:
    """Record the plan that a block runs with, for ``Patch.record`` and the step log."""
    if state.model.record is not None:
        first, *others = (picture.grid for picture in sequence_in(state).pictures)
        state.model.record[state.path] = RecordedPlan(plan, first, tuple(others))
    log = context.step_log
    if log is not None and not torch.compiler.is_compiling():
        log.note_plan(plan.inverse.shape[1], plan.keep.shape[1])


def _new_plan(state: BlockState, context: CallContext, pictures: Sequence[Picture], features: Tensor) -> Plan:
    b = features.shape[0]
    copies = context.guidance_copies if b % context.guidance_copies == 0 else 1
    if not state.batched:
        copies = b
    repeats = copies
    if copies > 1 and state.batched and context.copies_equal is not None:
        features, repeats = features_if_shared(features, copies, context.copies_equal.to(features.device)), 1
    elif copies > 1:
        features = shared_features(features, copies)
    planner, also = _planner_for(state, context, features)
    # The step is on the sample's device; blocks of a model on several devices may be elsewhere.
    plan = plan_pictures(planner, features, pictures, context.step.to(features.device), *also)
    return plan if repeats == 1 else plan.repeated(repeats)


def _planner_for(
    state: BlockState, context: CallContext, features: Tensor
) -> tuple[Planner, tuple[Tensor, ...]]:
    """Return the planner for a block's features, and what it looks at beside them.

    The planner is ``"tome"`` where that is not known yet.
    """
    settings = state.settings
    planner, tome = PLANNERS[settings.planner], PLANNERS["tome"]
    if settings.planner not in GUIDED_PLANNERS:
        return planner, ()
    change = context.guidance_difference
    importance = None if change is None else importance_of_tokens(change, *state.grids)
    part = state.model.threads.value.part
    if importance is not None and part is not None:
        start, stop = part_bounds(importance.shape[1], part.index, part.parts)
        importance = importance[:, start:stop]
    if importance is not None and len(features) == 1:
        importance = importance.mean(dim=0, keepdim=True)
    if importance is None or len(importance) != len(features):
        if change is not None:
            _warn_of_other_tokens(state, change, features)
        return tome, ()
    return planner, (importance.to(features.device),)


def _warn_of_other_tokens(state: BlockState, change: Tensor, features: Tensor) -> None:
    warnings.warn(
        f"{state.path}: planner={state.settings.planner!r} looks at what guidance changed, whose shape "
        f"{tuple(change.shape)} does not fit {len(features)} × {features.shape[1]} tokens; it plans as "
        "'tome' does",
        stacklevel=2,
    )
