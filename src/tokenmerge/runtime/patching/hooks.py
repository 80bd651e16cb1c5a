"""Forward hooks of a patched model: they fix what holds for a call, and what is used again in later ones."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tokenmerge.config import CACHED_FEATURES, ToMeConfig
from tokenmerge.config.origin import instead, named
from tokenmerge.errors import ConfigError, UnsupportedModelError
from tokenmerge.models.base import Grid
from tokenmerge.ops.once import first_numbers
from tokenmerge.plans.generation import Merging, Runs
from tokenmerge.runtime.blocks.stack import end_stack, merges_in_stacks
from tokenmerge.runtime.memory.run_log import RunLog, StepKind, StepLog, shown_by
from tokenmerge.runtime.memory.state import STATE, CallContext, Kept, Memory, ModelState, StageState
from tokenmerge.runtime.memory.uses import CHANGES, MARK, Mark
from tokenmerge.runtime.patching.call_checks import (
    check_call,
    phases_at,
    refuse_training,
    warn_where_nothing_is_saved,
)
from tokenmerge.runtime.patching.other_caches import refuse_other_caches
from tokenmerge.runtime.patching.unfused import why_tokens_count_once
from tokenmerge.runtime.patching.watched import look
from tokenmerge.runtime.steps.callbacks import calls_back, has_callback
from tokenmerge.runtime.steps.calls import Given, conditions_in, detail_of
from tokenmerge.runtime.steps.pipeline import (
    PerThread,
    guidance_copies,
    guidance_scale,
    running_pipeline,
)
from tokenmerge.runtime.steps.scheduler import (
    DenoisingStep,
    comes_later,
    has_run,
    is_over,
    is_timestep_of,
    needs_sync,
    noise_levels,
    repeats,
    row_of_frames,
    scheduler_of,
    waits_to_read,
)
from tokenmerge.runtime.steps.step_tracker import Decision, decide, number_of, same_step, step_seed

_TEXT_CHANGES = 2  # steps in a row with another text; a prompt that is replaced once changes it in one


class _Call(NamedTuple):
    """A call of a patched model, as the hook before it sees it."""

    state: ModelState
    root: nn.Module
    sample: Any
    timestep: Any
    seed: Tensor  # the number of the step that draws depend on
    running: Any  # the pipeline on the call stack; None: there is none
    pipe: Any  # that of the call, with its scheduler; None: unknown
    scheduler: Any
    step: DenoisingStep | None  # None: the settings do not follow the steps
    shape: tuple[int, ...]  # of the inputs; what is cached for one does not fit another
    memory: Memory


def before_model(root: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Before the model: check the call, and build what holds for it."""
    if torch.compiler.is_compiling():
        state: ModelState = root.__dict__[STATE]
    else:
        with CHANGES:  # another thread may restore or patch the model until then
            begun: ModelState | None = root.__dict__.get(STATE)
            if begun is None:
                return
            mark = Mark()  # lives as long as the call
            sys._getframe(1).f_locals[MARK] = mark
            begun.uses.begin_call(mark)
        state = begun
    arguments = {**dict(zip(state.call.parameters[: len(args)], args, strict=True)), **kwargs}
    check_call(state, root, arguments)
    call = _call_with(state, root, arguments)
    if call is None:
        state.begin_call()
        state.threads.value.context = _beside(state)
        return
    step, memory, tracker = call.step, call.memory, call.memory.tracker
    config = _config_of(call)
    copies, equal = _guidance_copies(call) if config.plans.guidance else (1, None)
    if _makes_plans(call, config):
        memory.forget_plans([tracker.plan_call])
    if step is not None and torch.is_grad_enabled():
        refuse_training(config, state.method)
    decision, settings = decide(config, tracker, call.shape), state.settings
    if step is not None:
        settings = {level: config.at_step(step.done, step.steps).at_level(level) for level in settings}
    elif config is not state.config:
        settings = {level: config.at_level(level) for level in settings}
    # What a later step plans by is cached.
    phases = () if step is None or torch.is_grad_enabled() else phases_at(config, *settings)
    cached = frozenset(
        {(level, own.features) for level, own in phases if own.merges and own.features in CACHED_FEATURES}
    )
    merges = decision.merging is not Merging.DENSE and any(own.merges for own in settings.values())
    state.threads.value.context = CallContext(
        settings=settings,
        seed=call.seed,
        call=tracker.call,
        plan_call=tracker.plan_call,
        caches_plans=config.plans.every > 1
        or config.plans.blocks
        # The other prompt of guidance may have a call of its own.
        or (config.plans.guidance and memory.sample.last is not None)
        # Gradient checkpointing may run blocks again after the model's forward.
        or (step is not None and torch.is_grad_enabled()),
        shares_plans=config.plans.blocks,
        caches_features=cached,
        has_stacks=(decision.caches and state.skips_blocks)
        or any(own == "model_residual" for _, own in cached)
        or any(merges_in_stacks(config.plans.blocks, own) for own in settings.values()),
        blocks_are_dense=not (merges or cached or (decision.caches and state.skips_blocks)),
        decision=decision,
        guidance_copies=copies,
        copies_equal=equal,
        guidance_difference=memory.guidance_differences.get(tracker.plan_call),
        step_log=None if torch.compiler.is_compiling() else _note_call(call, config, decision, merges),
    )


def _beside(state: ModelState) -> CallContext:
    """Return what holds for a call that belongs to no step: it is dense, and nothing of it is kept."""
    dense = Decision(merging=Merging.DENSE)
    return CallContext(settings=state.settings, beside=True, blocks_are_dense=True, decision=dense)


def before_blocks(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Before the module around some blocks: note their token grid, which its first argument shows."""
    state: PerThread[Grid] | StageState | None = module.__dict__.get(STATE)
    if state is None:  # another thread has restored the model since this call of it began
        return
    grids = state.grid if isinstance(state, StageState) else state
    assert grids is not None
    rows, columns = (args[0] if args else kwargs["hidden_states"]).shape[-2:]
    grids.value.shapes = ((1, rows, columns),)


def after_model(root: nn.Module, args: tuple, result: Any) -> None:
    """After a model: cache what its blocks added, and drop it after the last step; record the step."""
    state: ModelState | None = root.__dict__.get(STATE)
    if state is None:
        return
    thread = state.threads.value
    context, memory, log = thread.context, thread.memory, None
    if not torch.compiler.is_compiling():
        log = memory.log
        is_noted = state.uses.end_call(failed=result is None)
        # It failed, belongs to no step, or began before these settings were applied.
        if result is None or log is None or not is_noted or context.beside:
            thread.stack = None
            thread.spans.clear()
            return
    end_stack(thread)  # whose last tokens nobody has read
    if state.follows_steps:
        assert log is not None
        memory.tracker.numbers.note_result(context.call, result)
        _note_runs(state, root, log, result)
        if memory.tracker.is_last:
            memory.forget_results([memory.tracker.call])
        if state.config.guided_planner:
            _compare_guidance(memory, context, result if isinstance(result, Tensor) else result[0])
    if log is not None:
        log.observe(log.note_end)
        if context.step_log is not None:
            log.observe(context.step_log.end_call)
        if log.unseen and not context.seed.is_meta:  # no operations are counted
            state.warn_once(f"no estimate: {log.unseen}; the image is as without it")
    if context.guidance_difference is not None and not torch.is_grad_enabled():  # then blocks may run again
        thread.context = dataclasses.replace(context, guidance_difference=None)
    thread.spans.clear()


def _note_runs(state: ModelState, root: nn.Module, log: RunLog, result: Any) -> None:
    """Note what a call ran of the parts that some steps skip, and its result."""
    thread = state.threads.value
    decision, tracker = thread.context.decision, thread.memory.tracker
    if tracker.note_runs(thread.ran | ({"deep", "finest"} - state.skippable)):
        if decision.caches:
            log.observe(log.note_output, decision, thread.context.guidance_copies, tracker, result)
        return
    log.missed, log.sample = [], None
    log.note_kind(tracker.index, "reused")
    state.warn_once(
        f"{type(root).__name__}: other code left out what should have run in a step, as a second cache does "
        f"beside {named(state.method, state.config.reuse.given)}, so that the image can be far from the "
        "dense one; take one of the two off"
    )


def _compare_guidance(memory: Memory, context: CallContext, made: Any) -> None:
    # Several images, or what a ControlNet adds to each level, cannot be compared.
    if not isinstance(made, Tensor):
        return
    made, sample = made.detach(), memory.sample
    if context.guidance_copies > 1:
        unguided, guided, *_ = made.chunk(context.guidance_copies)
        memory.guidance_differences[context.plan_call] = guided - unguided
        return
    if sample.repeated and sample.result is not None:
        memory.guidance_differences[context.plan_call] = made - sample.result
    if sample.last is not None:
        sample.result = made


def _call_with(state: ModelState, root: nn.Module, arguments: Mapping[str, Any]) -> _Call | None:
    """Begin a call with these arguments, by name: return what is known of it. None: it belongs to no step."""
    sample, by = arguments[state.call.sample], state.call.timestep
    timestep, first = arguments[by] if isinstance(by, str) else by(root, arguments), sample[0]
    if state.numbers_steps:
        seed = step_seed(timestep, first.device, state.threads.value.numbers)
    else:  # without a launch
        seed = first_numbers(1, first.device)[0]
    running = running_pipeline()
    pipe = state.pipeline.of_call(running)
    shape: tuple[int, ...] = (len(sample), *first.shape)
    compiling = torch.compiler.is_compiling()
    scheduler: Any = None
    step: DenoisingStep | None = None
    given: Given | None = None
    if not compiling:
        scheduler = None if pipe is None else scheduler_of(pipe, timestep)
    elif state.follows_steps:
        raise UnsupportedModelError(
            f"{state.over_steps}: what follows the denoising steps cannot be compiled into one graph "
            "with the whole model; compile its blocks: model.compile_repeated_blocks()"
        )
    if state.follows_steps:
        if not state.pipeline.step_is_given and calls_back(running):
            return None
        step = state.pipeline.step(scheduler, timestep, pipe is running, running)
        if _belongs_to_no_step(state, scheduler, step, timestep, seed):
            return None
        if step is None:
            raise ConfigError(
                f"{state.over_steps}: cannot tell the denoising step, since no scheduler has it; apply "
                "token merging to the pipeline that runs instead of its model, call "
                "patch.at_step(i, steps) before each step of a loop of your own, or "
                f"{instead(state.method, 'leave that setting out')}"
            )
        text = arguments.get("encoder_hidden_states")
        if isinstance(text, Tensor):  # joint blocks change it too, and its length may differ at the next step
            shape = (*shape, *text.shape)
        known = state.memories.get(step.generation)
        if known is not None and known.tracker.index == step.index:
            given = _given(state, known, pipe, arguments, shape)
            if known.tracker.numbers.is_after_step(given):
                return None
    by_itself = step is None and running is None and scheduler is None
    if not compiling and not (by_itself and state.pipeline.given_step.value is None):
        _note_generation(state, step, running, scheduler, timestep)
    memory = _begin_in_memory(state, root, step, seed)
    if step is not None:
        given = given or _given(state, memory, pipe, arguments, shape)
        memory.tracker.begin_call(given, step.generation.schedule.adds_noise)
    return _Call(state, root, sample, timestep, seed, running, pipe, scheduler, step, shape, memory)


def _note_generation(
    state: ModelState, step: DenoisingStep | None, running: Any, scheduler: Any, timestep: Any
) -> None:
    """Note that this thread runs a generation, and drop what is cached of those that it has broken off."""
    if step is None and running is None and not waits_to_read(timestep, scheduler):
        with contextlib.suppress(ConfigError):  # a scheduler of another thread
            step = state.pipeline.step(scheduler, timestep, False)
    for ended in state.uses.note_generation(step, running):
        if (memory := state.memories.pop(ended, None)) is not None:
            memory.close()


def _belongs_to_no_step(
    state: ModelState, scheduler: Any, step: DenoisingStep | None, timestep: Any, seed: Tensor
) -> bool:
    """Return whether a call is beside the steps of a generation, such as one that a callback makes.

    It is at a timestep that is over, or not that of the step in which it is made.
    """
    if state.pipeline.step_is_given:
        known = None if step is None else state.memories.get(step.generation)
        if step is not None and known is not None and _differs(known, step, seed):
            raise _over(step)
        return False
    if step is None:
        if not has_run(scheduler):
            return False
        if is_over(scheduler, timestep, len(scheduler.timesteps)):
            return True
        state.warn_once(
            f"{state.over_steps}: a call belongs to no step of the scheduler, whose generation is over, and "
            "runs dense; before each step of a loop of your own, call patch.at_step(i, steps)"
        )
        return True
    if step.by_frames:  # the highest timestep stays the same while later frames begin
        return False
    if is_over(scheduler, timestep, step.index):
        return True
    known = state.memories.get(step.generation)
    if known is None or known.seed is None:
        return False
    if not _differs(known, step, seed):
        return (
            step.index == known.tracker.index + 1
            and (known.seed is seed or not needs_sync(seed))
            and same_step(known.seed, seed)
            and not repeats(scheduler, step.index)
        )
    # Two calls of one step have different timesteps. Reading these waits for the device.
    if is_timestep_of(scheduler, number_of(seed), step.index):
        known.forget()  # of the other call, which was taken for one of this step
        known.tracker.begin_again()
        return False
    other_fits = is_timestep_of(scheduler, number_of(known.seed), step.index)
    if other_fits and not comes_later(scheduler, number_of(seed), step.index):
        return True
    raise _over(step)


def _differs(known: Memory, step: DenoisingStep, seed: Tensor) -> bool:
    """Return whether a call of the running step has another timestep than the one before."""
    before = known.seed
    return step.index == known.tracker.index and before is not None and not same_step(before, seed)


def _over(step: DenoisingStep) -> ConfigError:
    return ConfigError(
        f"step {step.index} of {step.total} is over, by the timestep that the model is called with; "
        "call patch.at_step(i, steps) before each step of a loop of your own, or apply token merging "
        "to the very pipeline that runs: others that share its models have schedulers of their own"
    )


def _given(
    state: ModelState, memory: Memory, pipe: Any, arguments: Mapping[str, Any], shape: tuple[int, ...]
) -> Given:
    """Return what a call is given, by which it is recognised.

    Samples are compared on a CPU. On a device, that waits for it: there they are compared where something
    else than the scheduler may move them, which are tiles, of which a step has several, and callbacks.
    """
    sample = arguments[state.call.sample]
    waits = needs_sync(sample[0])
    compares = not waits or memory.tracker.numbers.has_tiles or has_callback(pipe)
    return Given(
        shape,
        conditions_in(arguments),
        weakref.ref(sample) if isinstance(sample, Tensor) else None,
        detail_of(sample) if compares else None,
        waits,
    )


def _begin_in_memory(state: ModelState, root: nn.Module, step: DenoisingStep | None, seed: Tensor) -> Memory:
    """Begin a call in the memory of its generation, and drop what is stale there."""
    thread = state.threads.value
    memory = thread.own_memory
    if step is not None:
        known = state.memories.get(step.generation)
        if known is None:
            refuse_other_caches(root, state.config, state.method)
        memory = state.memories.setdefault(step.generation, known or Memory(state.groups))
        memory.belong_to(step.generation, thread, state.memories)
        if stale := memory.tracker.begin_step(step):
            memory.forget(stale)
    memory.seed = seed
    if torch.compiler.is_compiling() or memory is not thread.memory:
        state.use(memory)
    state.begin_call()
    return memory


def _config_of(call: _Call) -> ToMeConfig:
    """Return the settings of the generation. Its first call chooses them; a tolerance may change them."""
    state, step, memory = call.state, call.step, call.memory
    if step is not None and memory.config is not None:
        if memory.tolerance is not None and memory.log is not None:
            if memory.tolerance.asks(step.done):  # after a full step, this waits once
                found = [own.log for own in state.pipeline.memories_of(step.generation)]
                logs = [log for log in found if log is not None]
                shown = memory.log.observe(shown_by, logs)
                seen = shown is not None and not any(log.unseen for log in logs)
                memory.tolerance.follow(step.done, shown if seen else None)
            memory.config = memory.log.config = memory.tolerance.config
        return memory.config
    config, tolerance, told = state.config, None, ""
    pipe, compiling, timesteps = call.pipe or call.running, torch.compiler.is_compiling(), None
    if step is None and not compiling:
        timesteps = None if pipe is None else getattr(scheduler_of(pipe, call.timestep), "timesteps", None)
        if isinstance(timesteps, Tensor):
            timesteps = weakref.ref(timesteps)  # there is one for each tensor
        if memory.config is not None and timesteps is not None and memory.timesteps is timesteps:
            return memory.config
    grids = state.threads.value.grid.shapes if state.merges else None
    default = state.default if step is not None else None
    if step is not None and default is not None:
        grid, generation = state.threads.value.grid.shapes[0], step.generation
        facts = default.facts_at(grid, step.steps, guidance_scale(call.pipe), generation.schedule)
        config = default.settings(facts)
    counts_once = "" if compiling else why_tokens_count_once(state, call.root, pipe, config, grids)
    state.warn_once(counts_once)
    if step is not None and default is not None:
        if counts_once:
            facts = dataclasses.replace(facts, proportional=False)
        told = default.shortfall(facts)
        if default not in generation.tolerances:  # the pipeline's models share it
            generation.tolerances[default] = default.tolerance(facts)
        tolerance = generation.tolerances[default]
        config = default.settings(facts) if tolerance is None else tolerance.config
    if counts_once and config.proportional:
        config = dataclasses.replace(config, proportional=False)
    if call.seed.is_meta:  # the operations of single steps are counted
        state.keep(state.kept, memory)
    elif not compiling:
        if memory.config is None or memory.timesteps is not timesteps:  # a generation begins
            if state.pipeline.began_before(call.scheduler, call.timestep):
                kept = _all_dense(state)
            else:
                kept = look(state, call.root, pipe, config, grids)
            state.keep(kept, memory)
            memory.timesteps = timesteps
            memory.log = None
            memory.tracker.noted.pop((memory.tracker.call, "answer"), None)
            # What others look at takes no part in a tolerance.
            memory.tolerance = tolerance if state.kept.config is config else None
            config = config if step is None else state.kept.config
        if step is not None:
            warn_where_nothing_is_saved(state, config, step)
    if told and not state.kept.note:  # a model that is left alone runs on all tokens
        state.warn_once(told)
    memory.config = config
    return config


def _all_dense(state: ModelState) -> Kept:
    """Return that nothing merges in a generation that began before the model was patched."""
    note = "this generation began before token merging was applied, in another thread, and stays dense"
    return Kept(ToMeConfig(ratio=0.0), frozenset(part.path for part in state.parts), note)


def _makes_plans(call: _Call, config: ToMeConfig) -> bool:
    """Decide which plans a call uses, and return whether it makes them."""
    state, memory, step = call.state, call.memory, call.step
    tracker = memory.tracker
    # With gradients, blocks may run again after the sample was freed, and its plans with it.
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        memory.sample.forget()
    else:
        first = call.sample[0] if isinstance(call.sample, list) else call.sample
        held = weakref.ref(memory)  # the tracker is a part of it
        generation = None if step is None else weakref.ref(step.generation)
        memory.sample.begin_call(first, call.seed, lambda _: _sample_gone(state, held(), generation))
        # It is a second call of one step, and not the first call of the next step.
        if (
            config.plans.guidance
            and memory.sample.repeated
            and (len(tracker.numbers.made) > 1 or step is None)
        ):
            return False
    if step is None:
        return True
    tracker.plan_call = tracker.call
    return tracker.plans(config.plans.every, (*call.shape, config.at_step(step.done, step.steps)))


def _sample_gone(state: ModelState, memory: Memory | None, generation: weakref.ref[Any] | None) -> None:
    """Drop what the next step will not use, after all calls on one sample; None: it is gone too."""
    if memory is None:
        return
    memory.sample.result = None
    if generation is None:
        memory.forget()
    elif memory.tracker.is_last:
        memory.forget(memory.tracker.calls_on_sample)
        living = generation()
        for other in [] if living is None else state.pipeline.memories_of(living):
            if not other.tracker.is_last:  # of a model that only runs the first steps
                other.forget()


def _note_call(call: _Call, config: ToMeConfig, decision: Decision, merges: bool) -> StepLog | None:
    """Note what a call does, for the handle. Return the log of its steps; None: they are not recorded."""
    state, step, sample, memory = call.state, call.step, call.sample, call.memory
    begins = memory.log is None
    if memory.log is None or step is None:
        grids = state.threads.value.grid.shapes if state.merges else ()
        log = RunLog(config, len(sample), grids, state.call.patch, None if step is None else step.steps)
        if memory.log is not None:  # of an earlier call of this generation
            log.began, log.unseen = memory.log.began, memory.log.unseen
        memory.log = log
        log.observe(_note_facts, call, log)
    state.runs.set(memory.log, begins)
    _note_misfits(call, config)
    kind: StepKind = "reused"
    if decision.runs is Runs.EVERYTHING:
        kind = "merged" if merges and decision.merging is Merging.MERGES else "unmerged"
    return memory.log.observe(_note_step, call, memory.log, kind, decision.caches)


def _note_facts(call: _Call, log: RunLog) -> None:
    """Note what a generation is like."""
    step, steps = call.step, getattr(call.scheduler, "num_inference_steps", None)
    if step is None:
        if (row := row_of_frames(call.running)) is not None:
            _, steps = row
        log.steps = steps if isinstance(steps, int) else None
    else:
        log.levels, log.schedule = noise_levels(call.scheduler, step), step.generation.schedule
    log.guidance = None if call.pipe is None else guidance_scale(call.pipe)


def _note_step(call: _Call, log: RunLog, kind: StepKind, caches: bool) -> StepLog | None:
    """Note what a step does. Return the log of the steps; None: they are not recorded."""
    state, step = call.state, call.step
    log.sample = call.sample if caches and isinstance(call.sample, Tensor) else None
    if step is not None:
        log.note_kind(step.index, kind)
        if step.index >= step.total - 1:
            logs = (own.log for own in state.pipeline.memories_of(step.generation))
            log.ending = [own for own in (log, *logs) if own is not None]
    if state.recorder is None:
        return None
    if step is None:
        with contextlib.suppress(ConfigError):  # settings that follow no step run without one
            runs_here = call.pipe is call.running
            step = state.pipeline.step(call.scheduler, call.timestep, runs_here, call.running)
    return None if step is None else state.recorder.begin_call(step, kind, call.seed.device)


def _note_misfits(call: _Call, config: ToMeConfig) -> None:
    """Note whether a call could use what is cached, and say so the first time that it could not."""
    state, log, numbers = call.state, call.memory.log, call.memory.tracker.numbers
    keeps = config.reuse.on or config.correction.on or config.cached_features or config.plans.every > 1
    if call.step is None or log is None or not keeps:
        return
    name, nothing = type(call.root).__name__, "such calls reuse nothing, which saves less time"
    if numbers.texts_changed >= _TEXT_CHANGES:
        state.warn_once(
            f"{name}: called with another text than in the step before, in one step after another, as in "
            f"null-text inversion; {nothing}"
        )
    if numbers.misfits != log.misfits:
        log.misfits = numbers.misfits
        state.warn_once(
            f"{name}: called with a sample that does not follow from one of the step before, such as a tile "
            f"that moves, or images that a callback puts in another order; {nothing}"
        )


def _guidance_copies(call: _Call) -> tuple[int, Tensor | None]:
    """Return how many copies of each sample the batch holds, and a tensor that says whether they are equal.

    The tensor is there only where reading it would synchronise the device.
    """
    expected = 1 if call.pipe is None else guidance_copies(call.pipe)
    if expected == 1:
        return 1, None
    latents, state = call.state.call.latents(call.root, call.sample), call.state
    # With the answer, copies need no positions of their own, which would take a call of attention for each.
    asks = state.follows_steps or state.shares_positions
    if asks and needs_sync(latents[0]) and not torch.compiler.is_compiling():
        question = (expected, len(call.sample), *call.sample[0].shape)
        equal = call.memory.tracker.answer(question, lambda: bool(_copies_are_equal(latents, expected)))
        return (expected if equal else 1), None
    found = _copies_are_equal(latents, expected)
    if found is not None and needs_sync(found):
        return expected, found
    return (expected if found else 1), None


def _copies_are_equal(sample: Tensor | Sequence[Tensor], copies: int) -> Tensor | None:
    """Return whether a batch holds the same samples several times, as a tensor; None: it cannot."""
    b, others = divmod(len(sample), copies)
    if others or sample[0].is_meta:
        return None
    pairs = [(sample[i], sample[i % b]) for i in range(b, len(sample))]
    if any(x.shape != first.shape for x, first in pairs):
        return None
    return torch.stack([(x == first).all() for x, first in pairs]).all()
