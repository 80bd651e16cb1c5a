"""What a handle tells of a generation: notes of each call, for the report, the estimate and warnings."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor, nn

from tokenmerge.config import ToMeConfig
from tokenmerge.config.origin import named
from tokenmerge.errors import ConfigError
from tokenmerge.plans.generation import Merging, StepKind
from tokenmerge.runtime.memory.run_log import RunLog, StepLog
from tokenmerge.runtime.memory.state import Memory, ModelState
from tokenmerge.runtime.patching.call_facts import CallFacts
from tokenmerge.runtime.steps.noise_levels import noise_levels
from tokenmerge.runtime.steps.pipeline import guidance_scale
from tokenmerge.runtime.steps.scheduler import row_of_frames
from tokenmerge.runtime.steps.step_tracker import Decision

_TEXT_CHANGES = 2  # steps in a row with another text; a prompt that is replaced once changes it in one


def note_call(
    facts: CallFacts, memory: Memory, config: ToMeConfig, decision: Decision, merges: bool
) -> StepLog | None:
    """Note what a call does. Return the log of the steps, or None if they are not recorded."""
    begins = memory.log is None
    log = memory.log
    if log is None or facts.step is None:
        log = _new_log(facts, memory.log, config)
        memory.log = log
        log.observe(_note_facts, facts, log)
    log.calls = max(log.calls, len(memory.tracker.numbers.made))
    facts.state.runs.set(log, begins)
    _note_misfits(facts, memory, log, config)
    kind = decision.kind.in_model(is_unet=not facts.state.skips_blocks)
    merges = merges and decision.merging is Merging.MERGES
    return log.observe(_note_step, facts, log, kind, merges, decision.caches)


def _new_log(facts: CallFacts, before: RunLog | None, config: ToMeConfig) -> RunLog:
    """Return the log of a generation, which goes on with the log of an earlier call of it."""
    state = facts.state
    grids = state.threads.value.grid.shapes if state.merges else ()
    steps = None if facts.step is None else facts.step.steps
    log = RunLog(config, len(facts.sample), grids, state.call.patch, steps)
    if before is not None:
        log.began = before.began
        log.unseen = before.unseen
    elif facts.step is not None:
        log.filled = facts.step.generation.filled
        log.fills = 0 if log.filled else state.threads.value.fills
        state.threads.value.fills = 0
    return log


def _note_facts(facts: CallFacts, log: RunLog) -> None:
    """Note the steps of a generation, its noise levels and its guidance."""
    if facts.step is None:
        steps = getattr(facts.scheduler, "num_inference_steps", None)
        row = row_of_frames(facts.running)
        if row is not None:
            _, steps = row
        log.steps = steps if isinstance(steps, int) else None
    else:
        log.levels = noise_levels(facts.scheduler, facts.step)
        log.schedule = facts.step.generation.schedule
    log.guidance = None if facts.pipe is None else guidance_scale(facts.pipe)


def _note_step(facts: CallFacts, log: RunLog, kind: StepKind, merges: bool, caches: bool) -> StepLog | None:
    """Note what a step does. Return the log of the steps, or None if they are not recorded."""
    state = facts.state
    step = facts.step
    log.sample = facts.sample if caches and isinstance(facts.sample, Tensor) else None
    if step is not None:
        log.note_kind(step.index, kind, merges)
        if step.index >= step.total - 1:
            logs = (memory.log for memory in state.pipeline.memories_of(step.generation))
            log.ending = [one for one in (log, *logs) if one is not None]
    if state.recorder is None:
        return None
    if step is None:
        with contextlib.suppress(ConfigError):  # settings that follow no step run without one
            runs_here = facts.pipe is facts.running
            step = state.pipeline.step(facts.scheduler, facts.timestep, runs_here, facts.running)
    return None if step is None else state.recorder.begin_call(step, kind, facts.seed.device)


def _note_misfits(facts: CallFacts, memory: Memory, log: RunLog, config: ToMeConfig) -> None:
    """Note whether a call could use what is cached, and say so the first time that it could not."""
    caches = (
        config.reuse.on or config.correction.on or config.cached_features or config.merge_sharing.every > 1
    )
    if facts.step is None or not caches:
        return
    numbers = memory.tracker.numbers
    name = type(facts.root).__name__
    costs = "such calls reuse nothing, which saves less time"
    if numbers.texts_changed >= _TEXT_CHANGES:
        facts.state.warn_once(
            f"{name}: called with another text than in the step before, in one step after another, as in "
            f"null-text inversion; {costs}"
        )
    if numbers.misfits != log.misfits:
        log.misfits = numbers.misfits
        facts.state.warn_once(
            f"{name}: called with a sample that does not follow from one of the step before, such as a tile "
            f"that moves, or images that a callback puts in another order; {costs}"
        )


def note_runs(state: ModelState, root: nn.Module, log: RunLog, result: Any) -> None:
    """Note what a call ran of the parts that some steps skip, and its result."""
    thread = state.threads.value
    decision = thread.context.decision
    tracker = thread.memory.tracker
    always_run = {"deep", "finest"} - state.skippable
    if tracker.note_runs(thread.ran | always_run):
        if decision.caches:
            log.observe(log.note_output, decision, thread.context.guidance_copies, tracker, result)
        return
    log.missed = []
    log.sample = None
    log.note_kind(tracker.index, StepKind.SKIPPED)
    state.warn_once(
        f"{type(root).__name__}: other code left out what should have run in a step, as a second cache does "
        f"beside {named(state.method, state.config.reuse.given)}, so that the image can be far from the "
        "dense one; take one of the two off"
    )


def note_end(state: ModelState, log: RunLog) -> None:
    """Note that a call has ended, and say so the first time that it could not be observed."""
    context = state.threads.value.context
    log.observe(log.note_end)
    if context.step_log is not None:
        log.observe(context.step_log.end_call)
    if log.unseen and not context.seed.is_meta:  # no operations are counted
        state.warn_once(f"no estimate: {log.unseen}; the image is as without it")
