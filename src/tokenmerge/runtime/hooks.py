"""What hooks note about a call of a patched model: its grid, its step, and what holds in it."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tokenmerge.errors import ConfigError, NothingToMergeError, UnsupportedModelError
from tokenmerge.models.layout import Grid
from tokenmerge.planners.tome import num_removed
from tokenmerge.runtime.guidance import parts_are_equal, same_step
from tokenmerge.runtime.state import STATE, Run, StageState
from tokenmerge.runtime.step_tracker import waits_for

__all__ = ["check_grid", "note_call", "note_end", "note_grid", "note_result"]


def note_call(root: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Before the model: refuse a sample that is too small, note its token grid and the denoising step."""
    run: Run = root.__dict__[STATE]
    arguments = {**dict(zip(run.parameters, args, strict=False)), **kwargs}
    if run.config.merges_stacks:
        _check_stacks(run, root, arguments)
    if run.config.reuse_every > 1 or any(settings.ratio for _, settings in run.stages):
        grid = run.read_grid(root, arguments, run.given_grid or run.grid)
        check_grid(run, grid)
        run.grid.shape = grid
    sample = arguments[run.sample]
    device = (sample[0] if isinstance(sample, list) else sample).device
    told = run.timestep
    timestep = arguments[told] if isinstance(told, str) else told(root, arguments)
    before, run.step = run.step, run.steps.of(timestep, device)
    if run.config.follows_steps:
        _note_step(run, root, timestep, before)
    if run.config.share_guidance:
        _note_parts(run, root, sample)
    shape = (len(sample), *sample[0].shape)
    text = arguments.get("encoder_hidden_states") if run.config.follows_steps else None
    # Joint blocks change the text too, and its length may be another one at the next step.
    _note_turn(run, sample, (*shape, *text.shape) if isinstance(text, Tensor) else shape)


def _check_stacks(run: Run, root: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Refuse a call in which something stands between blocks that would leave tokens merged."""
    between = [name for name in run.between if arguments.get(name) is not None]
    if torch.is_grad_enabled() and getattr(root, "is_gradient_checkpointing", False):
        between = ["gradient checkpointing"]
    if between:
        raise UnsupportedModelError(
            f"scope='stack' leaves tokens merged from block to block, and {' and '.join(between)} needs each "
            "block on its own; take scope='block', with share_plan=True for one plan"
        )


def _note_parts(run: Run, root: nn.Module, sample: Any) -> None:
    """Note which images of the batch are the same sample with other prompts."""
    parts = run.pipeline.parts
    equal = parts_are_equal(run.latents(root, sample), parts) if parts > 1 else None
    run.parts, run.shared = 1, None
    if equal is None:
        return
    if not waits_for(equal):
        run.parts = parts if equal else 1
    elif run.config.follows_steps and not torch.compiler.is_compiling():
        shape = (parts, len(sample), *sample[0].shape)
        run.parts = parts if run.turns.answer(shape, lambda: bool(equal)) else 1
    else:
        run.parts, run.shared = parts, equal


def _note_turn(run: Run, sample: Tensor | list[Tensor], shape: tuple[int, ...]) -> None:
    """Note which plans and corrections a call with inputs of this shape uses, and which it makes."""
    config, turns, again, anew = run.config, run.turns, False, True
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
    run.holds = (
        config.plan_every > 1
        or config.share_plan
        # For the other half of guidance, in a call of its own.
        or (config.share_guidance and run.same.known)
        # Blocks may run again, behind the model.
        or (config.follows_steps and torch.is_grad_enabled())
    )
    _note_reuse(run, shape)
    if config.correct_every and run.ahead is None and turns.corrects(config.correct_every, shape):
        _correct(run)


def _note_reuse(run: Run, shape: tuple[int, ...]) -> None:
    """Note what does not run in the running call, and whether what runs is kept for such calls."""
    turns = run.turns
    step, steps = turns.index - turns.first, turns.last + 1 - turns.first
    every, finest_every = run.config.reuse(steps)
    run.keeps = every > 1 and step < round(run.config.until * steps)
    if run.config.reuse_every > 1 and torch.is_grad_enabled():
        _refuse_training("reuse_every", run.config.reuse_every, 1)
    run.ahead = _ahead(run, "blocks", every, shape) if run.keeps else None
    # A step that runs everything runs the finest level of a UNet too.
    if run.ahead is None or step < round(run.config.reuse_finest_from * steps):
        finest_every = 1
    run.finest_ahead = _ahead(run, "finest", finest_every, shape) if run.keeps else None


def _ahead(run: Run, part: str, every: int, shape: tuple[int, ...]) -> Tensor | None:
    ahead = run.turns.ahead(part, every, shape)
    # A tensor, so that compiled blocks need no graph for each value.
    return None if ahead is None else torch.tensor(ahead)


def _refuse_training(name: str, value: int, off: int) -> None:
    raise ConfigError(
        f"{name}={value} keeps results of one step for the next and is for generation: call the model under "
        f"torch.no_grad(), or take {name}={off}"
    )


def _note_step(run: Run, root: nn.Module, timestep: Any, before: Tensor) -> None:
    """Note which step it is, and what holds at it; ``before`` is ``run.step`` of the last call."""
    if torch.compiler.is_compiling():
        raise UnsupportedModelError(
            f"{' and '.join(run.config.over_steps)}: what follows the denoising steps cannot be compiled "
            "into one graph with the whole model; compile its blocks: model.compile_repeated_blocks()"
        )
    moment = run.pipeline.moment(timestep)
    if moment is None:
        raise ConfigError(
            f"{' and '.join(run.config.over_steps)}: it has to be known which denoising step it is, and no "
            "scheduler says so: apply token merging to the pipeline that runs instead of its model, call "
            "patch.at_step(i, steps) before each step of a loop of your own, or leave that setting out"
        )
    if run.turns.begins_with(moment):
        _refuse_caches(run, root)
        _warn_where_nothing_is_saved(run, moment.total - moment.first)
    elif moment.index == run.turns.index and not same_step(before, run.step):
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
    if steps == 1:  # there is none to correct
        return
    used = not turns.is_last and any(run.config.at(level, index, steps).ratio for level in run.levels)
    if used and any(settings.ratio for settings in run.settings.values()):
        run.corrects = True
    else:
        run.settings = {level: dataclasses.replace(run.settings[level], ratio=0.0) for level in run.levels}


def note_end(root: nn.Module, args: tuple, result: Any) -> None:
    """Behind the model: after the last step, let go of what is kept, before the picture is decoded."""
    run: Run = root.__dict__[STATE]
    if run.turns.is_last:
        run.forget_results(run.turns.number)


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
    state: Grid | StageState = module.__dict__[STATE]
    grid = state if isinstance(state, Grid) else state.grid
    assert grid is not None
    x = args[0] if args else kwargs["hidden_states"]
    rows, columns = x.shape[-2:]
    grid.shape = 1, rows, columns


def _warn_where_nothing_is_saved(run: Run, steps: int) -> None:
    """Say that a generation is dense: too few steps to merge in or to leave out, and too few tokens."""
    grid = run.grid.shape
    if run.step.is_meta:  # operations of a single step are counted
        return
    if not round(run.config.until * steps):
        warnings.warn(
            f"nothing merges in this generation: until={run.config.until:g} of {steps} "
            f"step{'s' if steps > 1 else ''} is none; raise until, or take more steps",
            stacklevel=2,
        )
    elif run.config.reuse_every > 1 and run.config.reuse(steps) == (1, 1) and not _merges(run, grid):
        warnings.warn(
            f"this generation is dense: of {steps} steps reuse_span={run.config.reuse_span:g} leaves none "
            f"out, and on {math.prod(grid)} tokens, with min_tokens={run.config.min_tokens}, nothing merges; "
            "lower min_tokens, generate a larger image, or take more steps",
            stacklevel=2,
        )


def _merges(run: Run, grid: tuple[int, int, int]) -> bool:
    """Whether a call with this finest grid of (frames, rows, columns) has tokens to merge."""
    frames, rows, columns = grid
    return any(
        num_removed((frames, -(-rows // level), -(-columns // level)), settings) > 0
        for level, settings in run.stages
    )


def check_grid(run: Run, grid: tuple[int, int, int]) -> None:
    """See that a call with this finest grid of (frames, rows, columns) has tokens to merge.

    Raises:
        NothingToMergeError: it has not.
    """
    frames, rows, columns = grid
    asked = any(settings.ratio for _, settings in run.stages) and run.config.reuse_every == 1
    if asked and not _merges(run, grid):
        level, config = run.stages[0]
        sides = (frames, -(-rows // level), -(-columns // level))[frames == 1 :]
        cells = f"cells of sy={config.sy} × sx={config.sx}{f' × st={config.st}' if config.st > 1 else ''}"
        fewest = f" and min_tokens={config.min_tokens}" if config.min_tokens else ""
        lower = [*(["min_tokens"] if fewest else []), "sx and sy" if config.st == 1 else "sx, sy and st"]
        raise NothingToMergeError(
            f"nothing to merge: the sample gives {' × '.join(map(str, sides))} tokens at level {level}, of "
            f"which ratio={config.ratio:g} with {cells}{fewest} removes none; generate a larger image, lower "
            f"{', '.join(lower)}, or raise ratio"
        )
