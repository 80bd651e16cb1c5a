"""Forward hooks of a patched model: read its grid and step, and fix what holds for the call."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tokenmerge.config import MergeSettings, ToMeConfig
from tokenmerge.config.origin import instead, named
from tokenmerge.errors import ConfigError, UnsupportedModelError
from tokenmerge.models.layout import Grid
from tokenmerge.models.parallel import part_of
from tokenmerge.plans.generation import Merging, Runs
from tokenmerge.runtime.blocks.attention_kernels import reach_kernels
from tokenmerge.runtime.blocks.block_runs import finish_run
from tokenmerge.runtime.memory.caches import Memory
from tokenmerge.runtime.memory.context import CallContext
from tokenmerge.runtime.memory.forecasts import note_output
from tokenmerge.runtime.memory.run_log import RunLog, StepKind, shown
from tokenmerge.runtime.memory.state import STATE, ModelState, StageState
from tokenmerge.runtime.memory.step_log import StepLog
from tokenmerge.runtime.patching.call_checks import (
    check_given,
    check_part,
    check_size,
    refuse_caches,
    refuse_tracing,
    refuse_training,
    warn_of_other_conditions,
    warn_where_nothing_is_saved,
)
from tokenmerge.runtime.patching.plan_life import begin_plans, caches_plans, features_to_cache
from tokenmerge.runtime.patching.watched import look
from tokenmerge.runtime.steps.decide import Decision, decide
from tokenmerge.runtime.steps.guidance import copies_are_equal
from tokenmerge.runtime.steps.noise_levels import noise_levels
from tokenmerge.runtime.steps.per_thread import PerThread
from tokenmerge.runtime.steps.pipeline import guidance_copies, guidance_scale, running_pipeline
from tokenmerge.runtime.steps.scheduler import DenoisingStep, needs_sync, number_of_steps, scheduler_of
from tokenmerge.runtime.steps.step_seed import same_step
from tokenmerge.runtime.steps.step_tracker import StepTracker


def before_model(root: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Before the model: check the call, and build what holds for it.

    Raises:
        UnsupportedModelError, NothingToMergeError, ConfigError: the call does not fit the settings.
    """
    refuse_tracing(root)
    state: ModelState = root.__dict__[STATE]
    thread = state.threads.value
    arguments = {**dict(zip(state.call.parameters[: len(args)], args, strict=True)), **kwargs}
    _check_call(state, root, arguments)
    sample, by = arguments[state.call.sample], state.call.timestep
    timestep = arguments[by] if isinstance(by, str) else by(root, arguments)
    device = (sample[0] if isinstance(sample, list) else sample).device
    seed = thread.seed.of(timestep, device)

    pipe = state.pipeline.running()
    step = _step(state, root, pipe, timestep, seed) if state.facts.follows_steps else None
    if state.found_for is not None:
        warn_of_other_conditions(state, number_of_steps(scheduler_of(pipe, timestep), step))
    memory = _begin_in_memory(state, step, seed)
    config, tracker = _config_of(state, root, memory, pipe, step, timestep), memory.tracker
    copies, equal = 1, None
    if config.plans.guidance:
        copies, equal = _guidance_copies(state, tracker, root, sample, guidance_copies(pipe))
    shape = _shape_of(arguments, sample, step)
    if step is not None and tracker.changes_shape(shape):
        memory.forget_results(tracker.call)
    if begin_plans(state, config, memory, sample, seed, shape):
        memory.forget_plans(tracker.plan_call)
    if step is not None and torch.is_grad_enabled():
        refuse_training(config, state.method)
    decision = decide(config, tracker, shape)
    settings = _settings_of(state, config, step, decision)
    log = None
    if not torch.compiler.is_compiling():
        steps = number_of_steps(scheduler_of(pipe, timestep), step) if step is None else step.steps
        kind = _kind(decision, settings)
        _note_run(state, memory, config, step, steps, sample, kind, pipe, timestep)
        if state.recorder is not None:
            log = _begin_step_log(state, step, pipe, timestep, kind, device)
    thread.context = CallContext(
        config=config,
        settings=settings,
        step=seed,
        call=tracker.call,
        plan_call=tracker.plan_call,
        caches_plans=caches_plans(config, memory),
        caches_features=features_to_cache(config, tracker, settings),
        decision=decision,
        guidance_copies=copies,
        copies_equal=equal,
        guidance_difference=memory.guidance_differences.get(tracker.plan_call),
        step_log=log,
    )


def before_blocks(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Before the module around some blocks: note their token grid, which its first argument shows."""
    state: PerThread[Grid] | StageState = module.__dict__[STATE]
    grids = state.grid if isinstance(state, StageState) else state
    assert grids is not None
    x = args[0] if args else kwargs["hidden_states"]
    rows, columns = x.shape[-2:]
    grids.value.shape = 1, rows, columns


def after_model(root: nn.Module, args: tuple, result: Any) -> None:
    """After the model's forward: cache what its blocks added. After the last step, drop it."""
    state: ModelState = root.__dict__[STATE]
    thread = state.threads.value
    memory = thread.memory
    finish_run(thread)
    if memory is not None and memory.log is not None and not torch.compiler.is_compiling():
        memory.log.note_end()
        note_output(memory.log, thread, memory.tracker, result)
    if memory is not None and memory.tracker.is_last:
        memory.forget_results(memory.tracker.call)


def compare_guidance(root: nn.Module, args: tuple, result: Any) -> None:
    """After the model's forward: note what guidance changes in its result."""
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


def record_result(root: nn.Module, args: tuple, result: Any) -> None:
    """After the model's forward: record the end of the call and its result, if steps are recorded."""
    state: ModelState = root.__dict__[STATE]
    if (log := state.context.step_log) is not None and not torch.compiler.is_compiling():
        log.end_call(result)


def _check_call(state: ModelState, root: nn.Module, arguments: dict[str, Any]) -> None:
    """Refuse a call that does not fit the settings, and leave its token grids to the blocks."""
    thread = state.threads.value
    check_given(state, root, arguments)
    compiling = torch.compiler.is_compiling()
    if not compiling:
        reach_kernels(state)  # this model may be a copy, and kernels may have been loaded since
    thread.part = part_of(root)
    if state.facts.merges:
        grids = _grids(state, root, arguments, state.given_grid or thread.grid)
        if compiling or grids != thread.grid.shapes:  # those of the last call have been checked
            check_size(state, *grids)
            thread.grid.shapes = grids
        if thread.part is not None:
            check_part(state, root, thread.part, grids)


def _grids(
    state: ModelState, root: nn.Module, arguments: dict[str, Any], last: Grid
) -> tuple[tuple[int, int, int], ...]:
    """Return the finest token grids of a call: of the picture being made, then of its reference pictures."""
    references = state.call.references
    first = state.call.grid(root, arguments, last)
    return (first,) if references is None else (first, *references(root, arguments, last))


def _step(state: ModelState, root: nn.Module, pipe: Any, timestep: Any, seed: Tensor) -> DenoisingStep:
    """Return the denoising step of a call."""
    given = named(state.method, " and ".join(state.facts.over_steps))
    if torch.compiler.is_compiling():
        raise UnsupportedModelError(
            f"{given}: what follows the denoising steps cannot be compiled into one graph with the whole "
            "model; compile its blocks: model.compile_repeated_blocks()"
        )
    step = state.pipeline.step(pipe, timestep)
    if step is None:
        raise ConfigError(
            f"{given}: it has to be known which denoising step it is, and no scheduler says so: apply token "
            "merging to the pipeline that runs instead of its model, call patch.at_step(i, steps) before "
            f"each step of a loop of your own, or {instead(state.method, 'leave that setting out')}"
        )
    known = state.memories.get(step.generation)
    if known is None:
        refuse_caches(state, root)
    elif known.seed is not None and step.index == known.tracker.index and not same_step(known.seed, seed):
        raise ConfigError(
            f"step {step.index} of {step.total} is over, by the timestep that the model is called with; "
            "call patch.at_step(i, steps) before each step of a loop of your own, or apply token merging to "
            "the very pipeline that runs: others that share its models have schedulers of their own"
        )
    return step


def _begin_in_memory(state: ModelState, step: DenoisingStep | None, seed: Tensor) -> Memory:
    """Begin a call in the memory of its generation, and drop what is stale there."""
    thread = state.threads.value
    memory = thread.own_memory if step is None else state.memory_of(step.generation)
    memory.seed = seed
    if step is not None and (stale := memory.tracker.begin_call(step)) is not None:
        memory.forget(stale)
    if torch.compiler.is_compiling() or memory is not thread.memory:
        state.use(memory)
    state.begin_call()
    return memory


def _config_of(
    state: ModelState,
    root: nn.Module,
    memory: Memory,
    pipe: Any,
    step: DenoisingStep | None,
    timestep: Any,
) -> ToMeConfig:
    """Return the settings at the guidance scale of the generation, which is read in its first call."""
    if step is not None and memory.config is not None:
        return memory.config if memory.tolerance is None else _within_tolerance(state, memory, step)
    scale = guidance_scale(pipe)
    clean = step is not None and step.generation.ends_clean
    config = state.settings_at(scale, None if step is None else step.steps, clean)
    on_meta = memory.seed is not None and memory.seed.is_meta  # the operations of single steps are counted
    tolerance = None
    if step is not None and not on_meta:
        tolerance = state.tolerance_of(step, scale)
        config = config if tolerance is None else tolerance.config
    if on_meta:
        state.keep_dense(memory)
    elif not torch.compiler.is_compiling():
        pipe = pipe or running_pipeline()
        scheduler = None if step is not None else scheduler_of(pipe, timestep)
        timesteps = getattr(scheduler, "timesteps", None)
        if memory.config is None or memory.timesteps is not timesteps:  # a generation begins
            grids = state.threads.value.grid.shapes if state.facts.merges else None
            state.kept = look(state, root, pipe, config, grids)
            state.keep_dense(memory)
            memory.timesteps = timesteps
            # What others look at takes no part in a tolerance.
            memory.tolerance = tolerance if state.kept.config is config else None
            config = config if step is None else state.kept.config
    memory.config = config
    if step is not None and not on_meta:
        warn_where_nothing_is_saved(state, config, step)
    return config


def _within_tolerance(state: ModelState, memory: Memory, step: DenoisingStep) -> ToMeConfig:
    """Return the settings of a generation with a tolerance. After a complete step, this waits once."""
    tolerance = memory.tolerance
    assert tolerance is not None
    assert memory.log is not None
    if tolerance.asks(step.done):
        others = (other.memories.get(step.generation) for other in state.pipeline.states)
        logs = [own.log for own in others if own is not None and own.log is not None]
        tolerance.follow(step.done, shown(logs))
    memory.config = memory.log.config = tolerance.config
    return memory.config


def _settings_of(
    state: ModelState, config: ToMeConfig, step: DenoisingStep | None, decision: Decision
) -> Mapping[int, MergeSettings]:
    """Return what holds for each level at a step."""
    if step is None and config is state.config:
        return state.settings
    own = config if step is None else config.at_step(step.done, step.steps)
    settings = {level: own.at_level(level) for level in state.settings}
    if decision.merging is not Merging.DENSE:
        return settings
    return {
        level: dataclasses.replace(own, ratio=0.0, reference_ratio=None) for level, own in settings.items()
    }


def _shape_of(arguments: Mapping[str, Any], sample: Any, step: DenoisingStep | None) -> tuple[int, ...]:
    """Return the shape of a call's inputs; what is cached for one shape does not fit another."""
    shape = (len(sample), *sample[0].shape)
    text = None if step is None else arguments.get("encoder_hidden_states")
    # Joint blocks change the text too, and its length may differ at the next step.
    return (*shape, *text.shape) if isinstance(text, Tensor) else shape


def _kind(decision: Decision, settings: Mapping[int, MergeSettings]) -> StepKind:
    """Return what a call does, in a word."""
    if decision.runs is not Runs.EVERYTHING:
        return "reused"
    merges = decision.merging is Merging.MERGES and any(own.merges for own in settings.values())
    return "merged" if merges else "unmerged"


def _note_run(
    state: ModelState,
    memory: Memory,
    config: ToMeConfig,
    step: DenoisingStep | None,
    steps: int | None,
    sample: Any,
    kind: StepKind,
    pipe: Any,
    timestep: Any,
) -> None:
    """Note what a call does, for the handle of the patch."""
    if memory.log is None or step is None:
        grids = state.threads.value.grid.shapes if state.facts.merges else ()
        levels = None if step is None else noise_levels(scheduler_of(pipe, timestep), step)
        memory.log = RunLog(config, len(sample), grids, state.call.patch, steps, guidance_scale(pipe), levels)
    state.last_run = memory.log
    memory.log.sample = sample if isinstance(sample, Tensor) else None
    if step is not None:
        memory.log.note_step(step.index, kind)


def _begin_step_log(
    state: ModelState,
    step: DenoisingStep | None,
    pipe: Any,
    timestep: Any,
    kind: StepKind,
    device: torch.device,
) -> StepLog | None:
    """Note the beginning of a call, also where the settings follow no steps; None: its step is unknown."""
    assert state.recorder is not None
    if step is None:
        with contextlib.suppress(ConfigError):  # settings that follow no step run without one
            step = state.pipeline.step(pipe, timestep)
    return None if step is None else state.recorder.begin_call(step, kind, device)


def _guidance_copies(
    state: ModelState, tracker: StepTracker, root: nn.Module, sample: Any, expected: int
) -> tuple[int, Tensor | None]:
    """Return how many copies of each sample the batch holds, and a tensor that says whether they are equal.

    The tensor is there only where reading it would synchronise the device.
    """
    if expected == 1:
        return 1, None
    latents = state.call.latents(root, sample)
    if state.facts.follows_steps and needs_sync(latents[0]) and not torch.compiler.is_compiling():
        question = (expected, len(sample), *sample[0].shape)
        equal = tracker.answer(question, lambda: bool(copies_are_equal(latents, expected)))
        return (expected if equal else 1), None
    found = copies_are_equal(latents, expected)
    if found is None:
        return 1, None
    return (expected, found) if needs_sync(found) else (expected if found else 1, None)
