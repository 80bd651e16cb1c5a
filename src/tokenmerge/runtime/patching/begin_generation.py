"""A generation begins: which memory its calls share, and which settings hold in it."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenmerge.config import ToMeConfig
from tokenmerge.errors import ConfigError
from tokenmerge.models.base import Grids
from tokenmerge.plans.tolerance import Tolerance
from tokenmerge.runtime.memory.run_log import observations_of
from tokenmerge.runtime.memory.state import LeftAlone, Memory, ModelState
from tokenmerge.runtime.patching.call_checks import warn_where_nothing_is_saved
from tokenmerge.runtime.patching.call_facts import CallFacts, given_of
from tokenmerge.runtime.patching.other_caches import refuse_other_caches
from tokenmerge.runtime.patching.unfused import why_tokens_count_once
from tokenmerge.runtime.patching.watched import look, merged_parts
from tokenmerge.runtime.steps.pipeline import guidance_scale
from tokenmerge.runtime.steps.scheduler import DenoisingStep, scheduler_of, waits_to_read


def memory_of(facts: CallFacts) -> Memory:
    """Return the memory of the generation that a call belongs to, in which the call has begun."""
    state = facts.state
    has_none = facts.step is None and facts.running is None and facts.scheduler is None
    is_single_call = has_none and state.pipeline.given_step.value is None
    if not torch.compiler.is_compiling() and not is_single_call:
        _note_generation(facts)
    memory = _begin_in_memory(facts)
    if facts.step is not None:
        memory.tracker.begin_call(facts.given or given_of(facts, memory))
    return memory


def _note_generation(facts: CallFacts) -> None:
    """Note that this thread runs a generation, and drop what is cached of those that it has broken off."""
    state = facts.state
    step = facts.step
    if step is None and facts.running is None and not waits_to_read(facts.timestep, facts.scheduler):
        with contextlib.suppress(ConfigError):  # a scheduler of another thread
            step = state.pipeline.step(facts.scheduler, facts.timestep, False)
    for ended in state.uses.note_generation(step, facts.running):
        memory = state.memories.pop(ended, None)
        if memory is not None:
            memory.close()


def _begin_in_memory(facts: CallFacts) -> Memory:
    """Begin a call in the memory of its generation, and drop what is stale there."""
    state = facts.state
    thread = state.threads.value
    memory = thread.own_memory
    if facts.step is not None:
        generation = facts.step.generation
        known = state.memories.get(generation)
        if known is None:
            merging = set(merged_parts(state, state.config))
            refuse_other_caches(facts.root, state.config, state.method, merging)
        memory = state.memories.setdefault(generation, known or Memory(state.groups))
        memory.belong_to(generation, thread, state.memories)
        stale = memory.tracker.begin_step(facts.step)
        if stale:
            memory.forget(stale)
    memory.seed = facts.seed
    if torch.compiler.is_compiling() or memory is not thread.memory:
        state.use(memory)
    state.begin_call()
    return memory


def settings_of(facts: CallFacts, memory: Memory) -> ToMeConfig:
    """Return the settings of the generation. Its first call chooses them; a tolerance may change them."""
    if facts.step is not None and memory.config is not None:
        if memory.tolerance is not None:
            _follow(memory.tolerance, facts.state, facts.step, memory)
        return memory.config
    timesteps = _timesteps_of(facts)
    # A graph has no timesteps. It would be made anew where it read settings that it has not chosen itself.
    if timesteps is not None and memory.config is not None and memory.timesteps is timesteps:
        return memory.config
    state = facts.state
    grids = state.threads.value.grid.shapes if state.merges else None
    chosen = _choose(facts, grids)
    config = chosen.config
    if facts.seed.is_meta:  # the operations of single steps are counted
        state.leave_alone(state.left_alone, memory)
    elif not torch.compiler.is_compiling():
        if memory.config is None or memory.timesteps is not timesteps:
            config = _begin(facts, memory, chosen, grids, timesteps)
        if facts.step is not None:
            warn_where_nothing_is_saved(state, config, facts.step)
    if not state.left_alone.note:  # a model that is left alone runs on all tokens
        state.warn_once(chosen.warning)
    memory.config = config
    return config


class _Chosen(NamedTuple):
    """The settings that a generation would have if nobody else looked at the model."""

    config: ToMeConfig
    tolerance: Tolerance | None = None  # what changes them while the generation runs
    warning: str = ""  # what the default method cannot reach


def _choose(facts: CallFacts, grids: Grids | None) -> _Chosen:
    """Choose the settings of a generation, by the facts about it where the default method is asked for."""
    state = facts.state
    default = state.default if facts.step is not None else None
    pipe = facts.pipe or facts.running
    config = state.config
    if facts.step is not None and default is not None:
        schedule = facts.step.generation.schedule
        grid = state.threads.value.grid.shapes[0]
        run_facts = default.facts_at(grid, facts.step.steps, guidance_scale(facts.pipe), schedule)
        config = default.settings(run_facts)
    counts_once = ""
    if not torch.compiler.is_compiling():
        counts_once = why_tokens_count_once(state, facts.root, pipe, config, grids)
        state.warn_once(counts_once)
    tolerance = None
    warning = ""
    if facts.step is not None and default is not None:
        if counts_once:
            run_facts = dataclasses.replace(run_facts, proportional=False)
        warning = default.shortfall(run_facts)
        tolerances = facts.step.generation.tolerances  # the pipeline's models share them
        if default not in tolerances:
            tolerances[default] = default.tolerance(run_facts)
        tolerance = tolerances[default]
        config = default.settings(run_facts) if tolerance is None else tolerance.config
    if counts_once and config.proportional:
        config = dataclasses.replace(config, proportional=False)
    return _Chosen(config, tolerance, warning)


def _begin(
    facts: CallFacts, memory: Memory, chosen: _Chosen, grids: Grids | None, timesteps: Any
) -> ToMeConfig:
    """Begin a generation in its memory. Return its settings, which leave alone what other code looks at."""
    state = facts.state
    if state.pipeline.began_before(facts.scheduler, facts.timestep):
        left_alone = _all_dense(state)
    else:
        left_alone = look(state, facts.root, facts.pipe or facts.running, chosen.config, grids)
    state.leave_alone(left_alone, memory)
    memory.timesteps = timesteps
    memory.log = None
    memory.tracker.noted.pop((memory.tracker.call, "answer"), None)
    # What others look at takes no part in a tolerance.
    memory.tolerance = chosen.tolerance if left_alone.config is chosen.config else None
    return chosen.config if facts.step is None else left_alone.config


def _all_dense(state: ModelState) -> LeftAlone:
    """Return that nothing merges in a generation that began before the model was patched."""
    note = "this generation began before token merging was applied, in another thread, and stays dense"
    return LeftAlone(ToMeConfig(ratio=0.0), frozenset(part.path for part in state.parts), note)


def _timesteps_of(facts: CallFacts) -> Any:
    """Return the timesteps of the scheduler where the settings do not follow the steps, or None.

    A tensor is returned as a weak reference, of which there is one for each tensor.
    """
    pipe = facts.pipe or facts.running
    if facts.step is not None or pipe is None or torch.compiler.is_compiling():
        return None
    timesteps = getattr(scheduler_of(pipe, facts.timestep), "timesteps", None)
    return weakref.ref(timesteps) if isinstance(timesteps, Tensor) else timesteps


def _follow(tolerance: Tolerance, state: ModelState, step: DenoisingStep, memory: Memory) -> None:
    """Let a tolerance change the settings of a generation, by what its steps have shown."""
    log = memory.log
    if log is None:
        return
    if tolerance.asks(step.done):  # after a full step, this waits once
        found = [each.log for each in state.pipeline.memories_of(step.generation)]
        logs = [one for one in found if one is not None]
        observed = log.observe(observations_of, logs)
        is_seen = observed is not None and not any(one.unseen for one in logs)
        tolerance.follow(step.done, observed if is_seen else None)
    memory.config = tolerance.config
    log.config = tolerance.config
