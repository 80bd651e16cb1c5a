"""What holds for one call of a patched model: what it runs, what it merges, and what it caches."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokenmerge.config import CACHED_FEATURES, MergeSettings, ToMeConfig
from tokenmerge.plans.generation import Merging
from tokenmerge.runtime.blocks.stack import merges_in_stacks
from tokenmerge.runtime.memory.state import CallContext, Memory, ModelState
from tokenmerge.runtime.patching.call_checks import phases_at, refuse_training
from tokenmerge.runtime.patching.call_facts import CallFacts
from tokenmerge.runtime.patching.guidance import copies_in_batch
from tokenmerge.runtime.patching.run_notes import note_call
from tokenmerge.runtime.steps.pipeline import guidance_scale, scale_in_batch
from tokenmerge.runtime.steps.step_tracker import Decision, decide


def context_of(facts: CallFacts, memory: Memory, config: ToMeConfig) -> CallContext:
    """Return what holds for a call, with the settings of its generation."""
    state = facts.state
    step = facts.step
    tracker = memory.tracker
    copies, equal = copies_in_batch(facts, memory) if config.merge_sharing.guidance else (1, None)
    if _makes_plans(facts, memory, config):
        memory.forget_plans([tracker.plan_call])
    has_gradients = torch.is_grad_enabled()
    if step is not None and has_gradients:
        refuse_training(config, state.method)
    decision = decide(config, tracker, facts.shape)
    settings = _settings_by_level(facts, config)
    cached = _cached_features(facts, config, settings)
    skips_blocks = decision.caches and state.skips_blocks
    merges = decision.merging is not Merging.DENSE and any(one.merges for one in settings.values())
    stacks = any(merges_in_stacks(config.merge_sharing.blocks, one) for one in settings.values())
    caches_plans = (
        config.merge_sharing.every > 1
        or config.merge_sharing.blocks
        # The other prompt of guidance may have a call of its own.
        or (config.merge_sharing.guidance and memory.sample.last is not None)
        # Gradient checkpointing may run blocks again after the model's forward.
        or (step is not None and has_gradients)
    )
    return CallContext(
        settings=settings,
        seed=facts.seed,
        samples=len(facts.sample),
        call=tracker.call,
        plan_call=tracker.plan_call,
        caches_plans=caches_plans,
        shares_plans=config.merge_sharing.blocks,
        caches_features=cached,
        has_stacks=skips_blocks or stacks or any(kind == "model_residual" for _, kind in cached),
        blocks_are_dense=not (merges or cached or skips_blocks),
        decision=decision,
        guidance_copies=copies,
        guidance_scale=None if copies == 1 else scale_in_batch(facts.pipe),
        copies_equal=equal,
        guidance_difference=memory.guidance_differences.get(tracker.plan_call),
        sigmas=_sigmas_to_make_good(facts, memory, config),
        step_log=None
        if torch.compiler.is_compiling()
        else note_call(facts, memory, config, decision, merges),
    )


def _sigmas_to_make_good(facts: CallFacts, memory: Memory, config: ToMeConfig) -> Tensor | None:
    """Return the noise levels by which a full step makes good what forecasts missed, or None if none does.

    Guidance may also come by a second call in each step, of which the pipeline may not tell.
    """
    step = facts.step
    skips = config.reuse.on and facts.state.denoises
    if step is None or not skips or not step.generation.schedule.is_euler or step.by_frames:
        return None
    has_more_calls = memory.log is not None and memory.log.calls > 1
    if has_more_calls or guidance_scale(facts.pipe) != 1:
        return None
    return facts.scheduler.sigmas


def context_beside(state: ModelState) -> CallContext:
    """Return what holds for a call that belongs to no step: it is dense, and nothing of it is kept."""
    dense = Decision(merging=Merging.DENSE)
    return CallContext(settings=state.settings, beside=True, blocks_are_dense=True, decision=dense)


def _settings_by_level(facts: CallFacts, config: ToMeConfig) -> Mapping[int, MergeSettings]:
    """Return the settings of each level in this call."""
    state = facts.state
    if facts.step is not None:
        now = config.at_step(facts.step.done, facts.step.steps)
        return {level: now.at_level(level) for level in state.settings}
    if config is state.config:
        return state.settings
    return {level: config.at_level(level) for level in state.settings}


def _cached_features(
    facts: CallFacts, config: ToMeConfig, levels: Mapping[int, MergeSettings]
) -> frozenset[tuple[int, str]]:
    """Return the level and kind of the features that a later step compares, which are cached."""
    if facts.step is None or torch.is_grad_enabled():
        return frozenset()
    return frozenset(
        {
            (level, phase.features)
            for level, phase in phases_at(config, *levels)
            if phase.merges and phase.features in CACHED_FEATURES
        }
    )


def _makes_plans(facts: CallFacts, memory: Memory, config: ToMeConfig) -> bool:
    """Decide which plans a call uses, and return whether it makes them."""
    step = facts.step
    tracker = memory.tracker
    # With gradients, blocks may run again after the sample was freed, and its plans with it.
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        memory.sample.forget()
    else:
        _follow_sample(facts, memory)
        is_second_call = memory.sample.repeated and (len(tracker.numbers.made) > 1 or step is None)
        if config.merge_sharing.guidance and is_second_call:  # and not the first call of the next step
            return False
    if step is None:
        return True
    tracker.plan_call = tracker.call
    return tracker.plans(config.merge_sharing.every, (*facts.shape, config.at_step(step.done, step.steps)))


def _follow_sample(facts: CallFacts, memory: Memory) -> None:
    """Note the sample of a call. What the next step will not use is dropped when the sample is freed."""
    state = facts.state
    sample = facts.sample[0] if isinstance(facts.sample, list) else facts.sample
    held = weakref.ref(memory)  # the tracker is a part of it
    generation = None if facts.step is None else weakref.ref(facts.step.generation)
    memory.sample.begin_call(sample, facts.seed, lambda _: _sample_gone(state, held(), generation))


def _sample_gone(state: ModelState, memory: Memory | None, generation: weakref.ref[Any] | None) -> None:
    """Drop what the next step will not use, after all calls on one sample, unless its memory is gone too."""
    if memory is None:
        return
    memory.sample.result = None
    if generation is None:
        memory.forget()
        return
    if not memory.tracker.is_last:
        return
    memory.forget(memory.tracker.calls_on_sample)
    living = generation()
    if living is None:
        return
    for other in state.pipeline.memories_of(living):
        if not other.tracker.is_last:  # of a model that only runs the first steps
            other.forget()
