"""What the methods of a patched model do: merge, call the host's own method, unmerge."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tokenmerge.config import ToMeConfig
from tokenmerge.errors import ConfigError, NothingToMergeError, UnsupportedModelError
from tokenmerge.guidance import importance_of_tokens, parts_are_equal
from tokenmerge.kept import Change, change_of, changed, since
from tokenmerge.layout import Grid, Layout, add_lost, argument, given, keyed_call, merged_call
from tokenmerge.methods import GUIDED_PLANNERS, PLANNERS
from tokenmerge.methods.tome import num_removed
from tokenmerge.ops import (
    Plan,
    features_if_shared,
    keep_destinations,
    merge,
    merge_with_norm,
    num_tokens,
    shared_features,
)
from tokenmerge.proportional import ProportionalAttention
from tokenmerge.state import STATE, BlockState, LayerState, RecordedPlan, Run

__all__ = ["block_call", "check_grid", "layer_call", "note_call", "note_grid", "note_result", "parameters"]

COMBINE = {"mean": merge, "keep": keep_destinations, "norm": merge_with_norm}


# Hooks note what a call is about; they run around the module's ``forward``, whoever replaced that.


def note_call(root: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Before the model: refuse a sample that is too small, note its token grid and the denoising step."""
    run: Run = root.__dict__[STATE]
    arguments = {**dict(zip(run.parameters, args, strict=False)), **kwargs}
    grid = run.read_grid(root, arguments, run.grid)
    check_grid(run, grid)
    run.grid.frames, run.grid.rows, run.grid.columns = grid
    sample = arguments[run.sample]
    device = (sample[0] if isinstance(sample, list) else sample).device
    told = run.timestep
    timestep = arguments[told] if isinstance(told, str) else told(root, arguments)
    before, run.step = run.step, _step_of(timestep, device)
    if run.config.share_guidance:
        _note_parts(run, root, sample)
    if run.config.follows_steps:
        _note_step(run, root, timestep, before)
    _note_turn(run, sample)


def _note_parts(run: Run, root: nn.Module, sample: Any) -> None:
    """Note which images of the batch are the same sample with other prompts."""
    parts = run.pipeline.parts
    equal = parts_are_equal(run.latents(root, sample), parts) if parts > 1 else None
    if torch.compiler.is_compiling():
        run.parts, run.shared = (1, None) if equal is None else (parts, equal)
    else:
        run.parts, run.shared = parts if equal is not None and equal else 1, None


def _note_turn(run: Run, sample: Tensor | list[Tensor]) -> None:
    """Note which plans and corrections the running call uses, and which it makes."""
    config, turns, again, anew = run.config, run.turns, False, True
    shape = len(sample), *sample[0].shape
    run.corrects = False
    # With gradients, blocks may run again when the sample, and the plans with it, are gone.
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        run.same.forget()
    else:
        first = sample[0] if isinstance(sample, list) else sample
        run.same.note(first, run.step, run.sample_gone)
        # A second call of a step, not the first of the next one.
        again = config.share_guidance and run.same.again and (turns.number > 0 or not config.follows_steps)
    if not again and config.follows_steps:
        run.plan_turn = turns.number
        phase = config.phase(turns.index - turns.first, turns.last + 1 - turns.first)
        anew = turns.plans(config.plan_every, (*shape, phase))
    run.begin_call(plan_anew=anew and not again)
    run.holds = config.follows_steps or config.share_plan or run.same.known
    run.keeps = config.reuse_every > 1 and _keeps(run)
    ahead = turns.ahead(config.reuse_every, shape) if run.keeps else None
    # A tensor, so that compiled blocks need no graph for each value.
    run.ahead = None if ahead is None else torch.tensor(ahead)
    if config.correct_every and run.ahead is None and turns.corrects(config.correct_every, shape):
        _correct(run)


def _keeps(run: Run) -> bool:
    """Whether steps of this generation, and the running one, may do without their blocks."""
    if torch.is_grad_enabled():
        _refuse_training("reuse_every", run.config.reuse_every, 1)
    turns = run.turns
    step, steps = turns.index - turns.first, turns.last + 1 - turns.first
    return steps >= run.config.reuse_min_steps and step < round(run.config.until * steps)


def _refuse_training(name: str, value: int, off: int) -> None:
    raise ConfigError(
        f"{name}={value} keeps results of one step for the next and is for generation: call the model under "
        f"torch.no_grad(), or take {name}={off}"
    )


def _note_step(run: Run, root: nn.Module, timestep: Any, before: Tensor) -> None:
    """Note which step it is, and what holds at it; ``before`` is ``run.step`` of the last call."""
    if torch.compiler.is_compiling():
        raise UnsupportedModelError(
            "settings that follow the denoising steps cannot be compiled into one graph with the whole "
            "model; compile its blocks: model.compile_repeated_blocks()"
        )
    moment = run.pipeline.moment(timestep)
    if moment is None:
        raise ConfigError(
            "until, schedule, phases, plan_every, correct_every, reuse_every and planner='importance' need "
            "to know which denoising step it is, and no scheduler says so: apply token merging to the "
            "pipeline that runs instead of its model, or call patch.at_step(i, steps) before each step of a "
            "loop of your own"
        )
    if run.turns.begins_with(moment):
        _refuse_caches(run, root)
    elif moment.index == run.turns.index and not torch.equal(before, run.step):
        raise ConfigError(
            f"step {moment.index} of {moment.total} is over, by the timestep that the model is called with; "
            "call patch.at_step(i, steps) before each step of a loop of your own, or apply token merging to "
            "the very pipeline that runs: others that share its models have schedulers of their own"
        )
    over = run.turns.note(moment)
    if over is not None:
        run.forget(over)
    index, steps = moment.index - moment.first, moment.total - moment.first
    run.settings = {level: run.config.at(level, index, steps) for level in run.levels}


def _refuse_caches(run: Run, root: nn.Module) -> None:
    """Refuse hooks that count the calls of blocks where these do not run on every step."""
    every = run.config.reuse_every
    if every == 1:
        return
    for path, module in root.named_modules():
        hooks = getattr(module.__dict__.get("_diffusers_hook"), "hooks", {})
        for hook in hooks.values():
            if hook._is_stateful:
                raise UnsupportedModelError(
                    f"{path}: reuse_every={every} leaves blocks out on some steps, and {type(hook).__name__} "
                    "keeps results from call to call; take reuse_every=1, or remove that cache first: "
                    "model.disable_cache()"
                )


def _correct(run: Run) -> None:
    """Make the running call a dense one, and keep corrections if a step after it will merge with them."""
    if torch.is_grad_enabled():
        _refuse_training("correct_every", run.config.correct_every, 0)
    turns = run.turns
    index, steps = turns.index + 1 - turns.first, turns.last + 1 - turns.first
    used = not turns.is_last and any(run.config.at(level, index, steps).ratio for level in run.levels)
    if used and any(settings.ratio for settings in run.settings.values()):
        run.corrects = True
    else:
        run.settings = {level: dataclasses.replace(run.settings[level], ratio=0.0) for level in run.levels}


def note_result(root: nn.Module, args: tuple, result: Any) -> None:
    """Behind the model: note what guidance changes in its result."""
    run: Run = root.__dict__[STATE]
    made = result if isinstance(result, Tensor) else result[0]
    if not isinstance(made, Tensor):  # several pictures, or what a ControlNet adds to each level
        return
    if run.parts > 1:
        unguided, guided, *_ = made.detach().chunk(run.parts)
        run.guided[run.plan_turn] = guided - unguided
    elif run.same.again and run.same.result is not None:
        run.guided[run.plan_turn] = made.detach() - run.same.result
    if run.same.known and run.parts == 1:
        run.same.result = made.detach()


def note_grid(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Before the module around some blocks: note their token grid, that of its first argument."""
    grid: Grid = module.__dict__[STATE]
    x = args[0] if args else kwargs["hidden_states"]
    grid.frames, (grid.rows, grid.columns) = 1, x.shape[-2:]


# Two functions make the method of a swapped class from the method of the original one, taken as a plain
# function, which torch.compile can follow. A module that is called through a reference to this method after
# it was restored has no state and does what it did before.


def block_call(original: Callable) -> Callable:
    """The transformer block: plans from its input, for itself or for its sub-layers."""
    names = parameters(original)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: BlockState | None = self.__dict__.get(STATE)
        if state is None:
            return original(self, *args, **kwargs)
        # With gradients, it may run once more behind the model, as in the same call.
        state.number = 0 if torch.is_grad_enabled() else state.number + 1
        keeps = state.run.keeps and state.wide is not None
        return reused(self, state, args, kwargs) if keeps else run(self, state, args, kwargs)

    def reused(self: nn.Module, state: BlockState, args: tuple, kwargs: dict[str, Any]) -> Any:
        bases = functools.partial(_bases, state, names, args, kwargs)
        change = state.changes.get(state.call)
        if state.run.ahead is not None and change is not None:
            return changed(change, bases(None if change.alone else len(change.latest)), state.run.ahead)
        result = run(self, state, args, kwargs)
        added_to = bases(None if isinstance(result, Tensor) else len(result))
        state.changes[state.call] = since(change, change_of(result, added_to))
        return result

    def run(self: nn.Module, state: BlockState, args: tuple, kwargs: dict[str, Any]) -> Any:
        wide = state.wide if state.settings.scope == "block" else None
        if state.settings.scope == "block" and (wide is None or given(wide.whole, names, args, kwargs)):
            return original(self, *args, **kwargs)
        layout = state.layout
        tokens = argument(layout.tokens or names[0], names, args, kwargs)
        mask = argument(layout.padding, names, args, kwargs) if layout.padding else None
        plan = state.plan = _plan(state, tokens, mask)
        try:
            if wide is None or plan is None:
                return original(self, *args, **kwargs)

            def dense() -> Any:
                state.plan = None
                return original(self, *args, **kwargs)

            def merged() -> Any:
                function, combine = functools.partial(original, self), COMBINE[state.settings.combine]
                return merged_call(function, wide, plan, names, args, kwargs, combine, change_only=True)

            before = state.changes.get(state.call)
            result = _corrected(state, before, wide, plan, dense, merged)
            if _keeps_change(state, before) and not state.run.keeps:
                bases = _bases(
                    state, names, args, kwargs, None if isinstance(result, Tensor) else len(result)
                )
                state.changes[state.call] = change_of(result, bases)
            return result
        finally:
            state.plan = None

    return forward


def layer_call(original: Callable) -> Callable:
    """Attention or feed-forward: runs on merged tokens."""
    names = parameters(original)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: LayerState | None = self.__dict__.get(STATE)
        plan = None if state is None else state.block.plan
        if state is None or plan is None:
            return original(self, *args, **kwargs)
        settings = state.block.settings
        wide = settings.scope == "block"
        takes_part = (
            state.keys is not None if settings.scope == "keys" else state.kind in settings.merged_layers
        )
        tokens = argument(names[0], names, args, kwargs)
        # Parts of the sequence, as in feed-forward chunking, do not fit the plan.
        fits = _fits(plan, tokens, wide) and not given(state.layout.whole, names, args, kwargs)
        if not (wide or takes_part) or not fits:
            return original(self, *args, **kwargs)
        function, combine = functools.partial(original, self), COMBINE[settings.combine]
        if wide:
            with _proportional(state, plan):
                return function(*args, **kwargs)

        def merged() -> Any:
            with _proportional(state, plan):
                if settings.scope == "keys" and state.keys is not None:
                    _check_keys(self, state)
                    return keyed_call(function, state.layout, plan, state.keys, names, args, kwargs, combine)
                return merged_call(function, state.layout, plan, names, args, kwargs, combine)

        before = state.changes.get(state.block.call)
        dense = functools.partial(function, *args, **kwargs)
        result = _corrected(state.block, before, state.layout, plan, dense, merged)
        if _keeps_change(state.block, before):
            nothing = [0.0] * (1 if isinstance(result, Tensor) else len(result))
            state.changes[state.block.call] = change_of(result, nothing)
        return result

    return forward


def _corrected(
    block: BlockState,
    before: Change | None,
    layout: Layout,
    plan: Plan,
    dense: Callable[[], Any],
    merged: Callable[[], Any],
) -> Any:
    """The result of a block or layer: on dense steps exact, on others merged, with what merging loses.

    Args:
        block: that runs.
        before: what it, or its layer, changed when it last ran; None: nothing is known.
        layout: of its tokens.
        plan: for them.
        dense: → the exact result.
        merged: → the result on merged tokens.
    """
    if block.run.corrects:
        return dense()
    if before is None or not block.run.config.correct_every:
        return merged()
    return add_lost(layout, plan, merged(), before.latest, COMBINE[block.settings.combine])


def _keeps_change(block: BlockState, before: Change | None) -> bool:
    """Whether what a block or layer changes is kept, for corrections: from a dense step on."""
    run = block.run
    return run.corrects or (before is not None and bool(run.config.correct_every))


def _bases(
    state: BlockState, names: list[str], args: tuple, kwargs: dict[str, Any], count: int | None
) -> list[Tensor]:
    """What a block adds its change to: its tokens, or its text where that is among ``count`` results."""
    assert state.wide is not None
    tokens = argument(state.layout.tokens or names[0], names, args, kwargs)
    if count is None:
        return [tokens]
    text = argument("encoder_hidden_states", names, args, kwargs)
    return [tokens if i in state.wide.outputs else text for i in range(count)]


def _proportional(state: LayerState, plan: Plan) -> AbstractContextManager[Any]:
    if state.block.settings.proportional and state.kind == "attn1" and state.own_keys:
        return ProportionalAttention(plan, state.layout, state.block.path)
    return nullcontext()


def _check_keys(attention: nn.Module, state: LayerState) -> None:
    if getattr(attention, "fused_projections", False):
        raise UnsupportedModelError(
            f"{state.block.path}: scope='keys' needs keys and values projected apart from the queries, and "
            "they are fused; call unfuse_qkv_projections(), or take scope='layers'"
        )


def parameters(function: Callable) -> list[str]:
    """Names of a method's parameters after ``self``."""
    return list(inspect.signature(function).parameters)[1:]


def _fits(plan: Plan, x: Tensor, merged: bool) -> bool:
    b, n = plan.keep.shape if merged else plan.inverse.shape
    return x.shape[0] == b and x.shape[1] >= n


def _plan(state: BlockState, x: Tensor, mask: Tensor | None) -> Plan | None:
    """The plan for a block's tokens; ``mask`` tells them from padding behind them."""
    run, grid = state.run, state.grid.shape
    n = num_tokens(grid)
    if x.shape[1] < n:
        raise UnsupportedModelError(
            f"{state.path}: expected the {' × '.join(map(str, grid))} = {n} tokens of its grid, got an "
            f"input of shape {tuple(x.shape)}; this model calls its blocks in a way that tokenmerge does not "
            "know: remove_token_merging(model) restores it"
        )
    start = None if mask is None else mask.sum(dim=1) - n
    features = state.layout.image(x, n, start)
    if not state.settings.ratio:  # a plan that is kept is of a step that merged
        return None
    plan = state.plans.get(state.planning_call) if run.holds else None
    if plan is None or plan.inverse.shape != features.shape[:2]:
        plan = _new_plan(state, features)
        if run.holds and plan is not None:
            state.plans[state.planning_call] = plan
    if run.record is not None and plan is not None:
        run.record[state.path] = RecordedPlan(plan, grid)
    if plan is not None and start is not None:
        plan = plan.within(start, x.shape[1])
    return plan


def _new_plan(state: BlockState, features: Tensor) -> Plan | None:
    run, b = state.run, features.shape[0]
    # The step is where the sample is; blocks of a model on several devices need not be.
    step = run.step.to(features.device)

    def plan(features: Tensor) -> Plan | None:
        name, grid = state.settings.planner, state.grid.shape
        if name in PLANNERS:
            return PLANNERS[name](features, grid, state.settings, step)
        change = run.guided.get(run.plan_turn)
        importance = None if change is None else importance_of_tokens(change, grid)
        if importance is not None and len(features) == 1:
            importance = importance.mean(dim=0, keepdim=True)
        if importance is None or len(importance) != len(features):
            return PLANNERS["tome"](features, grid, state.settings, step)
        return GUIDED_PLANNERS[name](features, grid, state.settings, step, importance.to(features.device))

    parts = b if not state.batched else run.parts if b % run.parts == 0 else 1
    if parts == 1:
        return plan(features)
    if state.batched and run.shared is not None:
        return plan(features_if_shared(features, parts, run.shared.to(features.device)))
    shared = plan(shared_features(features, parts))
    return None if shared is None else shared.repeated(parts)


def check_grid(run: Run, grid: tuple[int, int, int]) -> None:
    """See that a call with this finest grid of (frames, rows, columns) has tokens to merge.

    Raises:
        NothingToMergeError: it has not.
    """
    frames, rows, columns = grid

    def merges(level: int, settings: ToMeConfig) -> bool:
        return num_removed((frames, -(-rows // level), -(-columns // level)), settings) > 0

    asked = any(settings.ratio for _, settings in run.stages) and run.config.reuse_every == 1
    if asked and not any(merges(*stage) for stage in run.stages):
        level, config = run.stages[0]
        sides = (frames, -(-rows // level), -(-columns // level))[frames == 1 :]
        cells = f"cells of sy={config.sy} × sx={config.sx}{f' × st={config.st}' if config.st > 1 else ''}"
        fewest = f" and min_tokens={config.min_tokens}" if config.min_tokens else ""
        raise NothingToMergeError(
            f"nothing to merge: the sample gives {' × '.join(map(str, sides))} tokens at level {level}, of "
            f"which ratio={config.ratio:g} with {cells}{fewest} removes none; generate a larger image, lower "
            f"{'sx, sy and st' if config.st > 1 else 'sx and sy'}, or raise ratio"
        )


def _step_of(timestep: Tensor | float, device: torch.device) -> Tensor:
    """An integer that differs between denoising steps: the bits of the timestep.

    The timestep rather than a counter: it is the same for the conditional and the unconditional half of
    classifier-free guidance, for every batch size, and in the second forward pass of gradient checkpointing.
    Training may give each sample of a batch its own timestep, and image-to-video models each token, with 0
    for the picture that is given; the latest counts for all.
    """
    latest = torch.as_tensor(timestep, device=device, dtype=torch.float32).max()
    return latest.view(torch.int32).to(torch.int64)
