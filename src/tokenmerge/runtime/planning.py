"""The plan of a block for its running call: a cached one, or a new one."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmerge.config import GUIDED_PLANNERS, MergeSettings, ToMeConfig
from tokenmerge.errors import NothingToMergeError, UnsupportedModelError
from tokenmerge.ops import Plan, features_if_shared, num_tokens, shared_features
from tokenmerge.planners import PLANNERS, num_removed
from tokenmerge.runtime.guidance import importance_of_tokens
from tokenmerge.runtime.state import BlockState, RecordedPlan

Stages = Sequence[tuple[int, MergeSettings]]


def merges_tokens(stages: Stages, grid: tuple[int, int, int]) -> bool:
    """Whether a call with this finest grid of (frames, rows, columns) has tokens to merge."""
    frames, rows, columns = grid
    return any(
        num_removed((frames, -(-rows // level), -(-columns // level)), settings) > 0
        for level, settings in stages
    )


def check_grid(config: ToMeConfig, stages: Stages, grid: tuple[int, int, int]) -> None:
    """See that a call with this finest grid of (frames, rows, columns) has tokens to merge.

    Raises:
        NothingToMergeError: it has none.
    """
    frames, rows, columns = grid
    asked = any(settings.ratio for _, settings in stages) and not config.reuses_steps
    if asked and not merges_tokens(stages, grid):
        if torch.compiler.is_compiling():  # a graph for all sizes knows no numbers
            raise NothingToMergeError(
                "nothing to merge: the sample gives too few tokens; generate a larger image, lower "
                "min_tokens, sx and sy, or raise ratio"
            )
        level, settings = stages[0]
        sides = (frames, -(-rows // level), -(-columns // level))[frames == 1 :]
        over_time = f" × st={settings.st}" if settings.st > 1 else ""
        cells = f"cells of sy={settings.sy} × sx={settings.sx}{over_time}"
        fewest = f" and min_tokens={settings.min_tokens}" if settings.min_tokens else ""
        lower = [*(["min_tokens"] if fewest else []), "sx, sy and st" if over_time else "sx and sy"]
        raise NothingToMergeError(
            f"nothing to merge: the sample gives {' × '.join(map(str, sides))} tokens at level {level}, of "
            f"which ratio={settings.ratio:g} with {cells}{fewest} removes none; generate a larger image, "
            f"lower {', '.join(lower)}, or raise ratio"
        )


def size_of(state: BlockState, x: Tensor, mask: Tensor | None) -> tuple[int, int] | None:
    """Images and tokens of a block's input, padding included; None: nothing would merge.

    Raises:
        UnsupportedModelError: the input has fewer tokens than the block's grid.
    """
    grid = state.grid_shape
    n = num_tokens(grid)
    if x.shape[1] < n:
        raise UnsupportedModelError(
            f"{state.path}: expected the {' × '.join(map(str, grid))} = {n} tokens of its grid, got an "
            f"input of shape {tuple(x.shape)}; this model calls its blocks in a way that tokenmerge does not "
            "know: remove_token_merging(model) restores it"
        )
    if not state.settings.ratio or not num_removed(grid, state.settings):
        return None
    return x.shape[0], n if mask is None else x.shape[1]


@torch.no_grad()  # with gradient checkpointing a second run does not plan, and must save as many tensors
def plan_of(state: BlockState, x: Tensor, mask: Tensor | None) -> Plan:
    """The plan for a block's tokens, of which some merge; ``mask`` tells them from padding behind them."""
    caches, plans = state.model.context.caches_plans, state.threads.value.cache.plans
    n = num_tokens(state.grid_shape)
    start = None if mask is None else mask.sum(dim=1) - n
    features = state.layout.image(x, n, start)
    plan = plans.get(state.plan_call) if caches else None
    if plan is None or plan.inverse.shape != features.shape[:2]:
        plan = _new_plan(state, features)
        if caches:
            plans[state.plan_call] = plan
    record_plan(state, plan)
    return plan if start is None else plan.within(start, x.shape[1])


def record_plan(state: BlockState, plan: Plan) -> None:
    """Leave the plan that a block runs with to whoever asks for it."""
    if state.model.record is not None:
        state.model.record[state.path] = RecordedPlan(plan, state.grid_shape)


def _new_plan(state: BlockState, features: Tensor) -> Plan:
    context, b = state.model.context, features.shape[0]
    # The step is on the sample's device; blocks of a model on several devices may be elsewhere.
    step = context.step.to(features.device)

    def plan(features: Tensor) -> Plan:
        found = planned(features)
        assert found is not None  # some tokens merge
        return found

    def planned(features: Tensor) -> Plan | None:
        settings, grid = state.settings, state.grid_shape
        planner = PLANNERS[settings.planner]
        if settings.planner not in GUIDED_PLANNERS:
            return planner(features, grid, settings, step)
        change = context.guidance_difference
        importance = None if change is None else importance_of_tokens(change, grid)
        if importance is not None and len(features) == 1:
            importance = importance.mean(dim=0, keepdim=True)
        if importance is None or len(importance) != len(features):
            if change is not None:
                _warn_of_other_tokens(state, change, features)
            return PLANNERS["tome"](features, grid, settings, step)
        return planner(features, grid, settings, step, importance.to(features.device))

    copies = context.guidance_copies if b % context.guidance_copies == 0 else 1
    if not state.batched:
        copies = b
    if copies == 1:
        return plan(features)
    if state.batched and context.copies_equal is not None:
        return plan(features_if_shared(features, copies, context.copies_equal.to(features.device)))
    return plan(shared_features(features, copies)).repeated(copies)


def _warn_of_other_tokens(state: BlockState, change: Tensor, features: Tensor) -> None:
    warnings.warn(
        f"{state.path}: planner={state.settings.planner!r} looks at what guidance changed, whose shape "
        f"{tuple(change.shape)} does not fit {len(features)} × {features.shape[1]} tokens; it plans as "
        "'tome' does",
        stacklevel=2,
    )
