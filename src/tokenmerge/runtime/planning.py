"""The plan of a block for its running call: one that is kept, or a new one."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from tokenmerge.config import GUIDED_PLANNERS
from tokenmerge.errors import UnsupportedModelError
from tokenmerge.ops import Plan, features_if_shared, num_tokens, shared_features
from tokenmerge.planners import PLANNERS
from tokenmerge.planners.tome import num_removed
from tokenmerge.runtime.guidance import importance_of_tokens
from tokenmerge.runtime.state import BlockState, RecordedPlan

__all__ = ["note_plan", "plan_of", "size_of"]


def size_of(state: BlockState, x: Tensor, mask: Tensor | None) -> tuple[int, int] | None:
    """Images and tokens that a plan for a block's input has, padding included; None: nothing would merge.

    Raises:
        UnsupportedModelError: the input has fewer tokens than the block's grid.
    """
    grid = state.grid.shape
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
    run, grid = state.run, state.grid.shape
    n = num_tokens(grid)
    start = None if mask is None else mask.sum(dim=1) - n
    features = state.layout.image(x, n, start)
    plan = state.plans.get(state.planning_call) if run.holds else None
    if plan is None or plan.inverse.shape != features.shape[:2]:
        plan = _new_plan(state, features)
        if run.holds:
            state.plans[state.planning_call] = plan
    note_plan(state, plan)
    return plan if start is None else plan.within(start, x.shape[1])


def note_plan(state: BlockState, plan: Plan) -> None:
    """Leave the plan that a block runs with to whoever asks for it."""
    if state.run.record is not None:
        state.run.record[state.path] = RecordedPlan(plan, state.grid.shape)


def _new_plan(state: BlockState, features: Tensor) -> Plan:
    run, b = state.run, features.shape[0]
    # The step is where the sample is; blocks of a model on several devices need not be.
    step = run.step.to(features.device)

    def plan(features: Tensor) -> Plan:
        found = planned(features)
        assert found is not None  # some tokens merge
        return found

    def planned(features: Tensor) -> Plan | None:
        settings, grid = state.settings, state.grid.shape
        planner = PLANNERS[settings.planner]
        if settings.planner not in GUIDED_PLANNERS:
            return planner(features, grid, settings, step)
        change = run.guided.get(run.plan_turn)
        importance = None if change is None else importance_of_tokens(change, grid)
        if importance is not None and len(features) == 1:
            importance = importance.mean(dim=0, keepdim=True)
        if importance is None or len(importance) != len(features):
            if change is not None:
                _warn_of_other_tokens(state, change, features)
            return PLANNERS["tome"](features, grid, settings, step)
        return planner(features, grid, settings, step, importance.to(features.device))

    parts = b if not state.batched else run.parts if b % run.parts == 0 else 1
    if parts == 1:
        return plan(features)
    if state.batched and run.shared is not None:
        return plan(features_if_shared(features, parts, run.shared.to(features.device)))
    return plan(shared_features(features, parts)).repeated(parts)


def _warn_of_other_tokens(state: BlockState, change: Tensor, features: Tensor) -> None:
    warnings.warn(
        f"{state.path}: planner={state.settings.planner!r} looks at what guidance changed, whose shape "
        f"{tuple(change.shape)} does not fit {len(features)} × {features.shape[1]} tokens; it plans as "
        "'tome' does",
        stacklevel=2,
    )
