"""How long plans, and what they compare, are used: made again, shared, cached, dropped."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from tokenmerge.config import CACHED_FEATURES, ToMeConfig
from tokenmerge.runtime.memory.caches import Memory
from tokenmerge.runtime.memory.state import ModelState
from tokenmerge.runtime.patching.select import phases_at
from tokenmerge.runtime.steps.scheduler import DenoisingStep, Generation
from tokenmerge.runtime.steps.step_tracker import StepTracker


def begin_plans(
    state: ModelState,
    config: ToMeConfig,
    memory: Memory,
    step: DenoisingStep | None,
    sample: Any,
    shape: tuple[int, ...],
) -> bool:
    """Decide which plans a call uses, and return whether it makes them."""
    tracker = memory.tracker
    # With gradients, blocks may run again after the sample was freed, and its plans with it.
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        memory.sample.forget()
    else:
        assert memory.seed is not None
        first = sample[0] if isinstance(sample, list) else sample
        held = weakref.ref(memory)  # the tracker is a part of it
        generation = None if step is None else weakref.ref(step.generation)
        memory.sample.begin_call(first, memory.seed, lambda: _sample_gone(state, held(), generation))
        # It is a second call of one step, and not the first call of the next step.
        if config.plans.guidance and memory.sample.repeated and (tracker.call > 0 or step is None):
            return False
    if step is None:
        return True
    tracker.plan_call = tracker.call
    return tracker.plans(config.plans.every, (*shape, config.at_step(step.done, step.steps)))


def caches_plans(config: ToMeConfig, memory: Memory) -> bool:
    """Return whether plans of the running call are used again."""
    return (
        config.plans.every > 1
        or config.plans.blocks
        # The other prompt of guidance may have a call of its own.
        or (config.plans.guidance and memory.sample.trackable)
        # Gradient checkpointing may run blocks again after the model's forward.
        or (memory.tracker.index >= 0 and torch.is_grad_enabled())
    )


def _sample_gone(
    state: ModelState, memory: Memory | None, generation: weakref.ref[Generation] | None
) -> None:
    """Drop what the next step will not use, after all calls on one sample; None: it is gone too."""
    if memory is None:
        return
    tracker = memory.tracker
    if generation is None:
        memory.forget()
    elif tracker.is_last:
        memory.forget(tracker.plan_call, tracker.call)
        living = generation()
        for other in state.pipeline.states:
            unfinished = None if living is None else other.memories.get(living)
            if unfinished is not None and not unfinished.tracker.is_last:
                unfinished.forget()  # a model that only runs the first steps


def features_to_cache(
    config: ToMeConfig, tracker: StepTracker, levels: Iterable[int]
) -> frozenset[tuple[int, str]]:
    """Return level and kind of the features that are cached, since a later step plans by them."""
    if tracker.index < 0 or torch.is_grad_enabled():
        return frozenset()
    phases = phases_at(config, *levels)
    return frozenset(
        (level, own.features) for level, own in phases if own.features in CACHED_FEATURES and own.merges
    )
