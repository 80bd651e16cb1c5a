"""The forward hooks of a patched model: before a call, before some blocks, and after the call.

The hook before the model fixes what holds for a call (``call_context``), with the settings and the memory of
its generation (``begin_generation``). The blocks read it. The hook after the model notes what the call ran.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
from torch import Tensor, nn

from tokenmerge.models.base import Grid
from tokenmerge.plans.generation import StepKind
from tokenmerge.runtime.blocks.stack import end_stack
from tokenmerge.runtime.memory.run_log import RunLog
from tokenmerge.runtime.memory.state import STATE, ModelState, StageState, ThreadState
from tokenmerge.runtime.memory.uses import CHANGES, MARK, Mark
from tokenmerge.runtime.patching.begin_generation import memory_of, settings_of
from tokenmerge.runtime.patching.call_checks import check_call
from tokenmerge.runtime.patching.call_context import context_beside, context_of
from tokenmerge.runtime.patching.call_facts import facts_of_call
from tokenmerge.runtime.patching.guidance import note_guidance
from tokenmerge.runtime.patching.run_notes import note_end, note_runs
from tokenmerge.runtime.steps.pipeline import PerThread


def before_model(root: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Before the model: check the call, and build what holds for it."""
    state: ModelState | None = root.__dict__.get(STATE)
    if not torch.compiler.is_compiling():
        with CHANGES:  # another thread may restore or patch the model until then
            state = root.__dict__.get(STATE)
            if state is None:
                return
            mark = Mark()  # lives as long as the call
            sys._getframe(1).f_locals[MARK] = mark
            state.uses.begin_call(mark)
    assert state is not None
    arguments = {**dict(zip(state.call.parameters[: len(args)], args, strict=True)), **kwargs}
    check_call(state, root, arguments)
    facts = facts_of_call(state, root, arguments)
    if facts is None:
        state.begin_call()
        state.threads.value.context = context_beside(state)
        return
    memory = memory_of(facts)
    config = settings_of(facts, memory)
    state.threads.value.context = context_of(facts, memory, config)


def before_blocks(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Before the module around some blocks: note their token grid, which its first argument shows."""
    state: PerThread[Grid] | StageState | None = module.__dict__.get(STATE)
    if state is None:  # another thread has restored the model since this call of it began
        return
    grids = state.grid if isinstance(state, StageState) else state
    assert grids is not None
    hidden_states = args[0] if args else kwargs["hidden_states"]
    rows, columns = hidden_states.shape[-2:]
    grids.value.shapes = ((1, rows, columns),)


def after_model(root: nn.Module, args: tuple, result: Any) -> Any:
    """After a model: cache what its blocks added, and drop it after the last step; record the step.

    Return what takes the place of the model's result, or None if it stays.
    """
    state: ModelState | None = root.__dict__.get(STATE)
    if state is None:
        return None
    thread = state.threads.value
    log = None
    if not torch.compiler.is_compiling():
        log = thread.memory.log
        is_noted = state.uses.end_call(failed=result is None)
        # It failed, belongs to no step, or began before these settings were applied.
        if result is None or log is None or not is_noted or thread.context.beside:
            thread.stack = None
            thread.spans.clear()
            return None
    end_stack(thread)  # whose last tokens nobody has read
    if state.follows_steps:
        assert log is not None
        result = _end_step(state, root, thread, log, result)
    if log is not None:
        note_end(state, log)
    if thread.context.guidance_difference is not None and not torch.is_grad_enabled():  # blocks may run again
        thread.context = dataclasses.replace(thread.context, guidance_difference=None)
    thread.spans.clear()
    return result


def _end_step(state: ModelState, root: nn.Module, thread: ThreadState, log: RunLog, result: Any) -> Any:
    """Note the result of a call whose settings follow the steps, and drop what no later step uses.

    Return the result of the call. In a full step, what earlier forecasts missed is made good in it.
    """
    context = thread.context
    memory = thread.memory
    runs = context.decision.kind is StepKind.FULL
    made = memory.tracker.made_good(result, runs, context.sigmas)
    memory.tracker.numbers.note_result(context.call, made)
    note_runs(state, root, log, result)
    if memory.tracker.is_last:
        memory.forget_results([memory.tracker.call])
    if state.config.guided_planner:
        note_guidance(memory, context, result if isinstance(result, Tensor) else result[0])
    return made
