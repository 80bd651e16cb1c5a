"""What is due in a call of a patched model: settings, new plans, skipped parts, corrections."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from tokenmerge.config import CACHED_FEATURES, MergeSettings, ToMeConfig
from tokenmerge.runtime.caches import Memory
from tokenmerge.runtime.call_checks import refuse_training
from tokenmerge.runtime.run_log import StepKind
from tokenmerge.runtime.scheduler import DenoisingStep
from tokenmerge.runtime.state import ModelState
from tokenmerge.runtime.step_tracker import StepTracker


@dataclasses.dataclass(frozen=True, eq=False)
class Due:
    """What is due in a call; its fields are those of :class:`tokenmerge.runtime.context.CallContext`."""

    settings: Mapping[int, MergeSettings]
    caches_residuals: bool
    corrects: bool
    extrapolation: Tensor | None
    shallow_extrapolation: Tensor | None

    @property
    def kind(self) -> StepKind:
        """What the call does, in a word."""
        if self.extrapolation is not None or self.shallow_extrapolation is not None:
            return "reused"
        merges = not self.corrects and any(own.merges for own in self.settings.values())
        return "full" if merges else "dense"


def due_of(
    config: ToMeConfig,
    memory: Memory,
    shape: tuple[object, ...],
    settings: Mapping[int, MergeSettings],
    method: str,
) -> Due:
    """Decide what is skipped in a call that has begun, and whether it is dense.

    Args:
        config: at the guidance scale of the generation.
        memory: of the generation.
        shape: of the call's inputs.
        settings: those of each level at the step, if it is not dense.
        method: name of the settings, for messages.
    """
    tracker = memory.tracker
    step = tracker.step
    extrapolation, shallow, caches_residuals = reuse_of(config, tracker, shape, method)
    corrects = False
    merges = step is None or config.schedule.merges(step.done, step.steps)
    if extrapolation is None and merges and correction_due(config, tracker, shape):
        corrects, settings = _correction_of(config, tracker, settings, method)
    return Due(settings, caches_residuals, corrects, extrapolation, shallow)


def settings_of(
    state: ModelState, config: ToMeConfig, step: DenoisingStep | None
) -> Mapping[int, MergeSettings]:
    """What holds for each level at a step."""
    if step is not None:
        return {level: config.at(level, step.done, step.steps) for level in state.settings}
    if config is state.config:
        return state.settings
    return {level: next(config.stages(level)) for level in state.settings}


def shape_of(arguments: Mapping[str, Any], sample: Any, step: DenoisingStep | None) -> tuple[int, ...]:
    """The shape of a call's inputs; what is cached for one shape does not fit another."""
    shape = (len(sample), *sample[0].shape)
    text = None if step is None else arguments.get("encoder_hidden_states")
    # Joint blocks change the text too, and its length may differ at the next step.
    return (*shape, *text.shape) if isinstance(text, Tensor) else shape


def begin_plans(
    state: ModelState,
    config: ToMeConfig,
    memory: Memory,
    sample: Any,
    seed: Tensor,
    shape: tuple[int, ...],
) -> bool:
    """Decide which plans a call uses, and return whether it makes them."""
    tracker = memory.tracker
    # With gradients, blocks may run again after the sample was freed, and its plans with it.
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        memory.sample.forget()
        repeated = False
    else:
        first = sample[0] if isinstance(sample, list) else sample
        held = weakref.ref(memory)  # the tracker is a part of it
        memory.sample.begin_call(first, seed, lambda: _sample_gone(state, held()))
        # It is a second call of one step, and not the first call of the next step.
        repeated = (
            config.plans.guidance and memory.sample.repeated and (tracker.call > 0 or tracker.step is None)
        )
    if repeated:
        return False
    if tracker.step is None:
        return True
    tracker.plan_call = tracker.call
    phase = config.schedule.phase(tracker.step.done, tracker.step.steps)
    return tracker.plans(config.plans.every, (*shape, phase))


def caches_plans(config: ToMeConfig, memory: Memory) -> bool:
    """Whether plans of the running call are used again."""
    return (
        config.plans.every > 1
        or config.plans.blocks
        # The other prompt of guidance may have a call of its own.
        or (config.plans.guidance and memory.sample.trackable)
        # Gradient checkpointing may run blocks again after the model's forward.
        or (memory.tracker.step is not None and torch.is_grad_enabled())
    )


def _sample_gone(state: ModelState, memory: Memory | None) -> None:
    """Drop what the next step will not use, after all calls on one sample; None: it is gone too."""
    if memory is None:
        return
    tracker, generation = memory.tracker, memory.generation()
    if tracker.step is None:
        memory.forget()
    elif tracker.is_last:
        memory.forget(tracker.plan_call, tracker.call)
        for other in state.pipeline.states:
            unfinished = None if generation is None else other.memories.get(generation)
            if unfinished is not None and not unfinished.tracker.is_last:
                unfinished.forget()  # a model that only runs the first steps


def reuse_of(
    config: ToMeConfig, tracker: StepTracker, shape: tuple[object, ...], method: str = ""
) -> tuple[Tensor | None, Tensor | None, bool]:
    """Decide which parts are skipped and whether residuals are cached.

    Returns:
        How far blocks or deep stages are extrapolated, how far the finest level is (None: they run), and
        whether residuals are cached.
    """
    step = tracker.step
    if config.reuse.on and torch.is_grad_enabled():
        refuse_training(config.reuse.given, "reuse.every=1", method)
    if step is None or not config.reuse.on:
        return None, None, False
    runs = config.reuse.steps_of(step.steps, step.adds_noise, step.ends_clean)
    if len(runs.full) == step.steps or not config.schedule.merges(step.done, step.steps):
        return None, None, False
    # Where the second step is full, two runs come first, also in a model that begins with a later step.
    extrapolation = _extrapolation(tracker, "blocks", step.done in runs.full, shape, 1 not in runs.full)
    # A step that runs everything runs the finest level of a UNet too.
    runs_shallow = extrapolation is None or step.done in runs.shallow
    shallow = _extrapolation(tracker, "shallow", runs_shallow, shape, 1 not in runs.shallow)
    return extrapolation, shallow, True


def features_to_cache(
    config: ToMeConfig, tracker: StepTracker, levels: Iterable[int]
) -> frozenset[tuple[int, str]]:
    """Level and kind of the features that are cached, since a later step plans by them."""
    if tracker.step is None or torch.is_grad_enabled():
        return frozenset()
    return frozenset(
        (level, stage.features)
        for level in levels
        for stage in config.stages(level)
        if stage.features in CACHED_FEATURES and stage.merges
    )


def _extrapolation(
    tracker: StepTracker, part: str, runs: bool, shape: tuple[object, ...], holds: bool
) -> Tensor | None:
    distance = tracker.extrapolation(part, runs, shape, holds)
    return None if distance is None else torch.tensor(distance)


def correction_due(config: ToMeConfig, tracker: StepTracker, shape: tuple[object, ...]) -> bool:
    """Decide whether a call that runs all blocks is dense."""
    return config.correction.on and tracker.corrects(config.correction.every, shape)


def _correction_of(
    config: ToMeConfig, tracker: StepTracker, settings: Mapping[int, MergeSettings], method: str
) -> tuple[bool, Mapping[int, MergeSettings]]:
    """Make the running call dense.

    Returns:
        Whether it measures corrections for a later step, and its settings.
    """
    if torch.is_grad_enabled():
        refuse_training(f"correction.every={config.correction.every}", "correction.every=0", method)
    step = tracker.step
    if step is None or step.steps == 1:  # there is no step to correct
        return False, settings
    used = not tracker.is_last and any(
        config.at(level, step.done + 1, step.steps).merges for level in settings
    )
    if used and any(own.merges for own in settings.values()):
        return True, settings
    return False, {
        level: dataclasses.replace(own, ratio=0.0, reference_ratio=None) for level, own in settings.items()
    }
