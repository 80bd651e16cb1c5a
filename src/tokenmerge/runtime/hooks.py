"""Forward hooks of a patched model: read its grid and step, and fix what holds for the call."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tokenmerge.config import MergeSettings
from tokenmerge.errors import ConfigError, UnsupportedModelError
from tokenmerge.models.layout import Grid
from tokenmerge.runtime.caches import Memory
from tokenmerge.runtime.context import CallContext
from tokenmerge.runtime.guidance import copies_are_equal
from tokenmerge.runtime.per_thread import PerThread
from tokenmerge.runtime.pipeline import guidance_copies
from tokenmerge.runtime.planning import check_grid, merges_tokens
from tokenmerge.runtime.scheduler import DenoisingStep, needs_sync
from tokenmerge.runtime.state import STATE, ModelState, StageState
from tokenmerge.runtime.step_seed import same_step
from tokenmerge.runtime.step_tracker import StepTracker

__all__ = ["after_model", "before_blocks", "before_model", "compare_guidance"]


def before_model(root: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Before the model: check the call, and build what holds for it.

    Raises:
        UnsupportedModelError, NothingToMergeError, ConfigError: the call does not fit the settings.
    """
    state: ModelState = root.__dict__[STATE]
    thread = state.threads.value
    arguments = {**dict(zip(state.call.parameters, args, strict=False)), **kwargs}
    _check_given(state, root, arguments)
    sample = arguments[state.call.sample]
    if state.config.merges_stacks:
        _check_stacks(state, root, arguments)
    grid = state.call.grid(root, arguments, thread.grid)
    check_grid(state.config, state.stages, grid)
    thread.grid.frames, thread.grid.rows, thread.grid.columns = grid
    by = state.call.timestep
    timestep = arguments[by] if isinstance(by, str) else by(root, arguments)
    device = (sample[0] if isinstance(sample, list) else sample).device
    seed = thread.seed.of(timestep, device)

    pipe = state.pipeline.running()
    step = _step(state, root, pipe, timestep, seed) if state.config.follows_steps else None
    memory = thread.own_memory if step is None else state.memory_of(step.generation)
    memory.seed, tracker = seed, memory.tracker
    if step is not None and (stale := tracker.begin_call(step)) is not None:
        memory.forget(stale)
    if torch.compiler.is_compiling() or memory is not thread.memory:
        state.use(memory)
    state.begin_call()

    settings = _settings(state, step)
    copies, equal = 1, None
    if state.config.plans.guidance:
        copies, equal = _guidance_copies(state, tracker, root, sample, guidance_copies(pipe))
    shape = _shape(state, arguments, sample)
    plans_anew = _begin_plans(state, memory, sample, seed, shape)
    if plans_anew:
        memory.forget_plans(tracker.plan_call)
    extrapolation, shallow, caches_residuals = _reuse(state, tracker, shape)
    corrects = False
    if (
        state.config.correction.every
        and extrapolation is None
        and tracker.corrects(state.config.correction.every, shape)
    ):
        corrects, settings = _correction(state, tracker, settings)
    thread.context = CallContext(
        settings=settings,
        step=seed,
        call=tracker.call,
        plan_call=tracker.plan_call,
        caches_plans=_caches_plans(state, memory),
        caches_residuals=caches_residuals,
        corrects=corrects,
        extrapolation=extrapolation,
        shallow_extrapolation=shallow,
        guidance_copies=copies,
        copies_equal=equal,
        guidance_difference=memory.guidance_differences.get(tracker.plan_call),
    )


def before_blocks(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Before the module around some blocks: note their token grid, that of its first argument."""
    state: PerThread[Grid] | StageState = module.__dict__[STATE]
    grids = state.grid if isinstance(state, StageState) else state
    assert grids is not None
    x = args[0] if args else kwargs["hidden_states"]
    grid = grids.value
    grid.frames, (grid.rows, grid.columns) = 1, x.shape[-2:]


def after_model(root: nn.Module, args: tuple, result: Any) -> None:
    """Behind the model: after the last step drop cached results, before the picture is decoded."""
    state: ModelState = root.__dict__[STATE]
    memory = state.threads.value.memory
    if memory is not None and memory.tracker.is_last:
        memory.forget_results(memory.tracker.call)


def compare_guidance(root: nn.Module, args: tuple, result: Any) -> None:
    """Behind the model: note what guidance changes in its result."""
    state: ModelState = root.__dict__[STATE]
    context, memory = state.context, state.threads.value.memory
    made = result if isinstance(result, Tensor) else result[0]
    # Several pictures, or what a ControlNet adds to each level, cannot be compared.
    if memory is None or not isinstance(made, Tensor):
        return
    sample = memory.sample
    if context.guidance_copies > 1:
        unguided, guided, *_ = made.detach().chunk(context.guidance_copies)
        memory.guidance_differences[context.plan_call] = guided - unguided
    elif sample.repeated and sample.result is not None:
        memory.guidance_differences[context.plan_call] = made.detach() - sample.result
    if sample.trackable and context.guidance_copies == 1:
        sample.result = made.detach()


def _check_given(state: ModelState, root: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Refuse a call that leaves out an argument from which the token grid and the step are read."""
    by = state.call.timestep
    needed = [state.call.sample, *([by] if isinstance(by, str) else [])]
    missing = [name for name in needed if arguments.get(name) is None]
    if missing:
        raise UnsupportedModelError(
            f"{type(root).__name__}: called without {' and '.join(missing)}; token merging reads the token "
            f"grid and the step from {' and '.join(needed)}, so pass {'both' if len(needed) > 1 else 'it'}"
        )


def _check_stacks(state: ModelState, root: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Refuse a call in which something between the blocks of a stack needs all tokens."""
    between = [name for name in state.call.between if arguments.get(name) is not None]
    if torch.is_grad_enabled() and getattr(root, "is_gradient_checkpointing", False):
        between = ["gradient checkpointing"]
    if between:
        raise UnsupportedModelError(
            f"scope='stack' leaves tokens merged from block to block, and {' and '.join(between)} needs each "
            "block on its own; take scope='block', with plans.blocks=True for one plan"
        )


def _step(state: ModelState, root: nn.Module, pipe: Any, timestep: Any, seed: Tensor) -> DenoisingStep:
    """The denoising step of a call."""
    if torch.compiler.is_compiling():
        raise UnsupportedModelError(
            f"{' and '.join(state.config.over_steps)}: what follows the denoising steps cannot be compiled "
            "into one graph with the whole model; compile its blocks: model.compile_repeated_blocks()"
        )
    step = state.pipeline.step(pipe, timestep)
    if step is None:
        raise ConfigError(
            f"{' and '.join(state.config.over_steps)}: it has to be known which denoising step it is, and no "
            "scheduler says so: apply token merging to the pipeline that runs instead of its model, call "
            "patch.at_step(i, steps) before each step of a loop of your own, or leave that setting out"
        )
    known = state.memories.get(step.generation)
    if known is None:
        _refuse_caches(state, root)
        _warn_where_nothing_is_saved(state, step.steps, on_meta=seed.is_meta)
    elif known.seed is not None and step.index == known.tracker.index and not same_step(known.seed, seed):
        raise ConfigError(
            f"step {step.index} of {step.total} is over, by the timestep that the model is called with; "
            "call patch.at_step(i, steps) before each step of a loop of your own, or apply token merging to "
            "the very pipeline that runs: others that share its models have schedulers of their own"
        )
    return step


def _settings(state: ModelState, step: DenoisingStep | None) -> Mapping[int, MergeSettings]:
    """What holds for each level at a step."""
    if step is None:
        return state.settings
    return {level: state.config.at(level, step.done, step.steps) for level in state.settings}


def _guidance_copies(
    state: ModelState, tracker: StepTracker, root: nn.Module, sample: Any, expected: int
) -> tuple[int, Tensor | None]:
    """How many times the batch holds each sample; and whether it does, where reading that would wait."""
    equal = copies_are_equal(state.call.latents(root, sample), expected) if expected > 1 else None
    if equal is None:
        return 1, None
    if not needs_sync(equal):
        return (expected if equal else 1), None
    if state.config.follows_steps and not torch.compiler.is_compiling():
        question = (expected, len(sample), *sample[0].shape)
        return (expected if tracker.answer(question, lambda: bool(equal)) else 1), None
    return expected, equal


def _shape(state: ModelState, arguments: Mapping[str, Any], sample: Any) -> tuple[int, ...]:
    """The shape of a call's inputs; what is cached for one shape does not fit another."""
    shape = (len(sample), *sample[0].shape)
    text = arguments.get("encoder_hidden_states") if state.config.follows_steps else None
    # Joint blocks change the text too, and its length may be another one at the next step.
    return (*shape, *text.shape) if isinstance(text, Tensor) else shape


def _begin_plans(
    state: ModelState, memory: Memory, sample: Any, seed: Tensor, shape: tuple[int, ...]
) -> bool:
    """Decide which plans a call uses; → whether it makes them."""
    config, tracker = state.config, memory.tracker
    # With gradients, blocks may run again when the sample, and the plans with it, are gone.
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        memory.sample.forget()
        repeated = False
    else:
        first = sample[0] if isinstance(sample, list) else sample
        memory.sample.begin_call(first, seed, lambda: _sample_gone(state, memory))
        # A second call of a step, and not the first call of the next one.
        repeated = (
            config.plans.guidance
            and memory.sample.repeated
            and (tracker.call > 0 or not config.follows_steps)
        )
    if repeated:
        return False
    if tracker.step is None:
        return True
    tracker.plan_call = tracker.call
    phase = config.schedule.phase(tracker.step.done, tracker.step.steps)
    return tracker.plans(config.plans.every, (*shape, phase))


def _caches_plans(state: ModelState, memory: Memory) -> bool:
    """Whether plans of the running call are used again."""
    config = state.config
    return (
        config.plans.every > 1
        or config.plans.blocks
        # For the other half of guidance, in a call of its own.
        or (config.plans.guidance and memory.sample.trackable)
        # Blocks may run again, behind the model.
        or (config.follows_steps and torch.is_grad_enabled())
    )


def _sample_gone(state: ModelState, memory: Memory) -> None:
    """After all calls on one sample: drop what the next step will not use."""
    tracker = memory.tracker
    if tracker.step is None:
        memory.forget()
    elif tracker.is_last:
        memory.forget(tracker.plan_call, tracker.call)
        for other in state.pipeline.states:
            unfinished = other.memories.get(tracker.step.generation)
            if unfinished is not None and not unfinished.tracker.is_last:
                unfinished.forget()  # of a model for the first steps alone


def _reuse(
    state: ModelState, tracker: StepTracker, shape: tuple[int, ...]
) -> tuple[Tensor | None, Tensor | None, bool]:
    """Decide which parts are skipped and whether residuals are cached.

    Returns:
        How far blocks or deep stages are extrapolated, how far the finest level is (None: they run), and
        whether residuals are cached.
    """
    config, step = state.config, tracker.step
    if config.reuse.every > 1 and torch.is_grad_enabled():
        _refuse_training("reuse.every", config.reuse.every, 1)
    if step is None:
        return None, None, False
    every, shallow_every = config.reuse.intervals(step.steps)
    if every == 1 or step.done >= round(config.schedule.until * step.steps):
        return None, None, False
    extrapolation = _extrapolation(tracker, "blocks", every, shape)
    # A step that runs everything runs the finest level of a UNet too.
    if extrapolation is None or step.done < round(config.reuse.shallow_from * step.steps):
        shallow_every = 1
    return extrapolation, _extrapolation(tracker, "shallow", shallow_every, shape), True


def _extrapolation(tracker: StepTracker, part: str, every: int, shape: tuple[int, ...]) -> Tensor | None:
    distance = tracker.extrapolation(part, every, shape)
    return None if distance is None else torch.tensor(distance)


def _refuse_training(name: str, value: int, off: int) -> None:
    raise ConfigError(
        f"{name}={value} caches results of one step for the next and is for generation: call the model under "
        f"torch.no_grad(), or take {name}={off}"
    )


def _refuse_caches(state: ModelState, root: nn.Module) -> None:
    """Refuse diffusers' caches, which count the calls of blocks, where blocks are skipped on some steps."""
    every = state.config.reuse.every
    if every == 1:
        return
    for path, module in root.named_modules():
        hooks = getattr(module.__dict__.get("_diffusers_hook"), "hooks", {})
        for hook in hooks.values():
            if hook._is_stateful:
                raise UnsupportedModelError(
                    f"{path}: reuse.every={every} leaves blocks out on some steps, and {type(hook).__name__} "
                    "keeps results from call to call; take reuse.every=1, or remove that cache first: "
                    "model.disable_cache()"
                )


def _correction(
    state: ModelState, tracker: StepTracker, settings: Mapping[int, MergeSettings]
) -> tuple[bool, Mapping[int, MergeSettings]]:
    """Make the running call dense.

    Returns:
        Whether it measures corrections, which a step after it uses; and its settings.
    """
    if torch.is_grad_enabled():
        _refuse_training("correction.every", state.config.correction.every, 0)
    step = tracker.step
    if step is None or step.steps == 1:  # there is no step to correct
        return False, settings
    used = not tracker.is_last and any(
        state.config.at(level, step.done + 1, step.steps).ratio for level in settings
    )
    if used and any(own.ratio for own in settings.values()):
        return True, settings
    return False, {level: dataclasses.replace(own, ratio=0.0) for level, own in settings.items()}


def _warn_where_nothing_is_saved(state: ModelState, steps: int, on_meta: bool) -> None:
    """Warn about a generation that is dense: too few steps to merge or to skip, and too few tokens."""
    config, grid = state.config, state.threads.value.grid.shape
    if on_meta:  # operations of a single step are counted
        return
    if not round(config.schedule.until * steps):
        warnings.warn(
            f"nothing merges in this generation: schedule.until={config.schedule.until:g} of {steps} "
            f"step{'s' if steps > 1 else ''} is none; raise until, or take more steps",
            stacklevel=2,
        )
    elif (
        config.reuse.every > 1
        and config.reuse.intervals(steps) == (1, 1)
        and not merges_tokens(state.stages, grid)
    ):
        tokens = grid[0] * grid[1] * grid[2]
        warnings.warn(
            f"this generation is dense: of {steps} steps reuse.span={config.reuse.span:g} leaves none "
            f"out, and on {tokens} tokens, with min_tokens={config.min_tokens}, nothing merges; "
            "lower min_tokens, generate a larger image, or take more steps",
            stacklevel=2,
        )
