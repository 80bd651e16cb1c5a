"""Forward hooks of a patched model: read its grid and step, and fix what holds for the call."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tokenmerge.config import ToMeConfig
from tokenmerge.config.origin import instead
from tokenmerge.errors import ConfigError, UnsupportedModelError
from tokenmerge.models.base import Grid
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
    warn_where_nothing_is_saved,
)
from tokenmerge.runtime.patching.plan_life import begin_plans, caches_plans, features_to_cache
from tokenmerge.runtime.patching.watched import look
from tokenmerge.runtime.steps.guidance import copies_are_equal
from tokenmerge.runtime.steps.noise_levels import noise_levels
from tokenmerge.runtime.steps.pipeline import PerThread, guidance_copies, guidance_scale, running_pipeline
from tokenmerge.runtime.steps.scheduler import DenoisingStep, needs_sync, scheduler_of
from tokenmerge.runtime.steps.step_seed import same_step
from tokenmerge.runtime.steps.step_tracker import Decision, StepTracker, decide


class _Call(NamedTuple):
    """A call of a patched model, as the hook before it sees it.

    ``seed`` is the number of the step that draws depend on. ``running`` is the pipeline on the call stack,
    and ``pipe`` that of the call, with its ``scheduler``; None: unknown. ``step`` is None where the settings
    do not follow the steps. What is cached for one ``shape`` of the inputs does not fit another.
    """

    state: ModelState
    root: nn.Module
    sample: Any
    timestep: Any
    seed: Tensor
    running: Any
    pipe: Any
    scheduler: Any
    step: DenoisingStep | None
    shape: tuple[int, ...]


def before_model(root: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Before the model: check the call, and build what holds for it."""
    refuse_tracing(root)
    state: ModelState = root.__dict__[STATE]
    arguments = {**dict(zip(state.call.parameters[: len(args)], args, strict=True)), **kwargs}
    _check_call(state, root, arguments)
    call = _call_with(state, root, arguments)
    step, compiling = call.step, torch.compiler.is_compiling()
    memory = _begin_in_memory(state, step, call.seed)
    tracker = memory.tracker
    config = _config_of(call, memory)
    copies, equal = _guidance_copies(call, tracker) if config.plans.guidance else (1, None)
    if step is not None and tracker.changes_shape(call.shape):
        memory.forget_results(tracker.call, tracker.call)
    if begin_plans(state, config, memory, step, call.sample, call.shape):
        memory.forget_plans(tracker.plan_call, tracker.plan_call)
    if step is not None and torch.is_grad_enabled():
        refuse_training(config, state.method)
    decision, settings = decide(config, tracker, call.shape), state.settings
    if step is not None:
        now = config.at_step(step.done, step.steps)
        settings = {level: now.at_level(level) for level in settings}
    cached = features_to_cache(config, tracker, settings)
    merges = decision.merging is not Merging.DENSE and any(own.merges for own in settings.values())
    state.threads.value.context = CallContext(
        settings=settings,
        step=call.seed,
        call=tracker.call,
        plan_call=tracker.plan_call,
        caches_plans=caches_plans(config, memory),
        caches_features=cached,
        blocks_are_dense=not (merges or cached or (decision.caches and state.skips_blocks)),
        decision=decision,
        guidance_copies=copies,
        copies_equal=equal,
        guidance_difference=memory.guidance_differences.get(tracker.plan_call),
        step_log=None if compiling else _note_call(call, memory, config, decision, merges),
    )


def before_blocks(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Before the module around some blocks: note their token grid, which its first argument shows."""
    state: PerThread[Grid] | StageState = module.__dict__[STATE]
    grids = state.grid if isinstance(state, StageState) else state
    assert grids is not None
    rows, columns = (args[0] if args else kwargs["hidden_states"]).shape[-2:]
    grids.value.shapes = ((1, rows, columns),)


def after_model(root: nn.Module, args: tuple, result: Any) -> None:
    """After the model's forward: cache what its blocks added. After the last step, drop it."""
    state: ModelState = root.__dict__[STATE]
    thread = state.threads.value
    memory = thread.memory
    finish_run(thread)
    if memory.log is not None and not torch.compiler.is_compiling():
        memory.log.note_end()
        if thread.context.decision.caches:
            note_output(memory.log, thread, result)
    if memory.tracker.is_last:
        memory.forget_results(memory.tracker.call, memory.tracker.call)


def compare_guidance(root: nn.Module, args: tuple, result: Any) -> None:
    """After the model's forward: note what guidance changes in its result."""
    state: ModelState = root.__dict__[STATE]
    context, memory = state.context, state.threads.value.memory
    made = result if isinstance(result, Tensor) else result[0]
    # Several pictures, or what a ControlNet adds to each level, cannot be compared.
    if not isinstance(made, Tensor):
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
    """Refuse a call that does not fit the settings, and leave its token grids to the blocks.

    The grids are the finest ones: of the picture being made, then of its reference pictures.
    """
    thread, call = state.threads.value, state.call
    check_given(state, root, arguments)
    compiling = torch.compiler.is_compiling()
    if not compiling:
        reach_kernels(state)  # this model may be a copy, and kernels may have been loaded since
    thread.part = part_of(root)
    if state.merges:
        last = state.given_grid or thread.grid
        grids = call.grids(root, arguments, last)
        if compiling or grids != thread.grid.shapes:  # those of the last call have been checked
            check_size(state, *grids)
            thread.grid.shapes = grids
        if thread.part is not None:
            check_part(state, root, thread.part, grids)


def _call_with(state: ModelState, root: nn.Module, arguments: Mapping[str, Any]) -> _Call:
    """Return what is known of a call with these arguments, by name."""
    sample, by = arguments[state.call.sample], state.call.timestep
    timestep, first = arguments[by] if isinstance(by, str) else by(root, arguments), sample[0]
    seed = state.threads.value.seed.of(timestep, first.device)
    running = running_pipeline()
    pipe, shape = state.pipeline.of_call(running), (len(sample), *first.shape)
    if torch.compiler.is_compiling():
        if state.follows_steps:
            raise UnsupportedModelError(
                f"{state.over_steps}: what follows the denoising steps cannot be compiled into one graph "
                "with the whole model; compile its blocks: model.compile_repeated_blocks()"
            )
        return _Call(state, root, sample, timestep, seed, running, pipe, None, None, shape)
    scheduler, step = scheduler_of(pipe, timestep), None
    if state.follows_steps:
        step = state.pipeline.step(scheduler, timestep, pipe is running)
        _check_step(state, root, step, seed)
        text = arguments.get("encoder_hidden_states")
        if isinstance(text, Tensor):  # joint blocks change it too, and its length may differ at the next step
            shape = (*shape, *text.shape)
    return _Call(state, root, sample, timestep, seed, running, pipe, scheduler, step, shape)


def _check_step(state: ModelState, root: nn.Module, step: DenoisingStep | None, seed: Tensor) -> None:
    """Refuse a call whose denoising step is not known, or is over."""
    if step is None:
        raise ConfigError(
            f"{state.over_steps}: it has to be known which denoising step it is, and no scheduler says so: "
            "apply token merging to the pipeline that runs instead of its model, call "
            "patch.at_step(i, steps) before each step of a loop of your own, or "
            f"{instead(state.method, 'leave that setting out')}"
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


def _begin_in_memory(state: ModelState, step: DenoisingStep | None, seed: Tensor) -> Memory:
    """Begin a call in the memory of its generation, and drop what is stale there."""
    thread = state.threads.value
    memory = thread.own_memory
    if step is not None:
        known = state.memories.get(step.generation)
        memory = state.memories.setdefault(step.generation, known or Memory(state.groups))
    memory.seed = seed
    if step is not None and (stale := memory.tracker.begin_call(step)) is not None:
        memory.forget(stale)
    if torch.compiler.is_compiling() or memory is not thread.memory:
        state.use(memory)
    state.begin_call()
    return memory


def _config_of(call: _Call, memory: Memory) -> ToMeConfig:
    """Return the settings of the generation, which its first call chooses."""
    state, step = call.state, call.step
    if step is not None and memory.config is not None:
        return memory.config if memory.tolerance is None else _within_tolerance(state, memory, step)
    config, tolerance = state.config, None
    on_meta = call.seed.is_meta  # the operations of single steps are counted
    if step is not None and state.default is not None:
        grid, generation = state.threads.value.grid.shape, step.generation
        facts = state.default.facts_at(grid, step.steps, guidance_scale(call.pipe), generation.ends_clean)
        state.warn_once(state.default.shortfall(facts))
        config, tolerances = state.default.settings(facts), state.pipeline.tolerances
        if not on_meta:
            if generation not in tolerances:  # the pipeline's models share it
                tolerances[generation] = state.default.tolerance(facts)
            tolerance = tolerances[generation]
            config = config if tolerance is None else tolerance.config
    if on_meta:
        state.keep_dense(memory)
    elif not torch.compiler.is_compiling():
        pipe = call.pipe or call.running
        scheduler = None if step is not None else scheduler_of(pipe, call.timestep)
        timesteps = getattr(scheduler, "timesteps", None)
        if memory.config is None or memory.timesteps is not timesteps:  # a generation begins
            grids = state.threads.value.grid.shapes if state.merges else None
            state.kept = look(state, call.root, pipe, config, grids)
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


def _note_call(
    call: _Call, memory: Memory, config: ToMeConfig, decision: Decision, merges: bool
) -> StepLog | None:
    """Note what a call does, for the handle. Return the log of its steps; None: they are not recorded."""
    state, step, sample = call.state, call.step, call.sample
    if memory.log is None or step is None:
        guidance = guidance_scale(call.pipe)
        grids = state.threads.value.grid.shapes if state.merges else ()
        steps, levels = getattr(call.scheduler, "num_inference_steps", None), None
        if step is not None:
            steps, levels = step.steps, noise_levels(call.scheduler, step)
        steps = steps if isinstance(steps, int) else None
        memory.log = RunLog(config, len(sample), grids, state.call.patch, steps, guidance, levels)
    state.last_run = memory.log
    memory.log.sample = sample if decision.caches and isinstance(sample, Tensor) else None
    kind: StepKind = "reused"
    if decision.runs is Runs.EVERYTHING:
        kind = "merged" if merges and decision.merging is Merging.MERGES else "unmerged"
    if step is not None:
        memory.log.note_step(step.index, kind)
    if state.recorder is None:
        return None
    if step is None:
        with contextlib.suppress(ConfigError):  # settings that follow no step run without one
            step = state.pipeline.step(call.scheduler, call.timestep, call.pipe is call.running)
    return None if step is None else state.recorder.begin_call(step, kind, call.seed.device)


def _guidance_copies(call: _Call, tracker: StepTracker) -> tuple[int, Tensor | None]:
    """Return how many copies of each sample the batch holds, and a tensor that says whether they are equal.

    The tensor is there only where reading it would synchronise the device.
    """
    expected = guidance_copies(call.pipe)
    if expected == 1:
        return 1, None
    latents = call.state.call.latents(call.root, call.sample)
    if call.state.follows_steps and needs_sync(latents[0]) and not torch.compiler.is_compiling():
        question = (expected, len(call.sample), *call.sample[0].shape)
        equal = tracker.answer(question, lambda: bool(copies_are_equal(latents, expected)))
        return (expected if equal else 1), None
    found = copies_are_equal(latents, expected)
    if found is None:
        return 1, None
    return (expected, found) if needs_sync(found) else (expected if found else 1, None)
