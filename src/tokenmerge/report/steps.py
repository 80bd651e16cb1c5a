"""What settings come to over the steps of a generation: in words, operations and memory."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from tokenmerge.config import StepReuse, ToMeConfig
from tokenmerge.models.base import Host
from tokenmerge.report.flops import count_flops
from tokenmerge.runtime.patch import new_state, patch_host, restore
from tokenmerge.runtime.pipeline import Pipeline
from tokenmerge.runtime.state import ModelState

__all__ = ["kept_bytes", "mean_flops", "notes_on_steps"]

# Enough for two that run all blocks, after which reuse keeps most, and another that is not the last.
_STEPS_TO_KEEP_MOST = 4

Arguments = Callable[[], dict[str, Any]]


def mean_flops(host: Host, config: ToMeConfig, steps: int, arguments: Arguments) -> int:
    """Operations of a call, mean over the steps of a generation; the model may be one without weights.

    Args:
        host: the model, not patched.
        config: what to merge and how much.
        steps: number of them, ≥ 1.
        arguments: → those of a call by name; each step has its own.
    """
    name = type(host.root).__name__
    with _patched(host, config) as state:
        counts = []
        for index in range(steps):
            state.pipeline.set_step(index, steps)
            counts.append(count_flops(host.root, arguments())[name])
    return round(sum(counts) / steps)


def kept_bytes(host: Host, config: ToMeConfig, arguments: Arguments) -> int:
    """Memory for what is kept from one step for those after it: corrections, changes and plans.

    Args:
        host: the model, not patched.
        config: what to merge and how much.
        arguments: → those of a call by name; each step has its own.
    """
    if not config.correction.every and config.reuse.every == config.plans.every == 1:
        return 0
    keeping = dataclasses.replace(
        config.most(),
        plans=config.plans,
        correction=config.correction,
        reuse=StepReuse(every=config.reuse.every, shallow_every=config.reuse.shallow_every),
    )
    with _patched(host, keeping) as state:
        for index in range(2):
            state.pipeline.set_step(index, _STEPS_TO_KEEP_MOST)
            count_flops(host.root, arguments())
        memory = state.threads.value.memory
        caches = () if memory is None else memory.caches
        residuals = [residual for cache in caches for residual in cache.residuals.values()]
        plans = {id(plan): plan for cache in caches for plan in cache.plans.values()}.values()
    kept = [tensor for residual in residuals for tensor in (*residual.latest, *(residual.delta or ()))]
    kept += [tensor for plan in plans for tensor in plan]
    return sum(tensor.nbytes for tensor in kept if isinstance(tensor, Tensor))


@contextlib.contextmanager
def _patched(host: Host, config: ToMeConfig) -> Iterator[ModelState]:
    state = new_state(host, config, Pipeline())
    patch_host(host, state)
    try:
        yield state
    finally:
        restore(host.root)


def notes_on_steps(config: ToMeConfig) -> list[str]:
    """What differs between levels and between steps, in words."""
    notes = [f"level {level}: {_in_words(changes)}" for level, changes in config.levels.items()]
    notes += [
        f"from {_percent(start)} of the steps on: {_in_words(changes)}"
        for start, changes in config.schedule.phases.items()
    ]
    if callable(config.schedule.ratio):
        notes.append(f"the ratio follows a function over the steps, {config.most().ratio:g} at most")
    elif config.schedule.changes_ratio:
        ratios = " to ".join(f"{config.ratio * factor:g}" for factor in config.schedule.ratio)
        notes.append(f"the ratio goes from {ratios} over the steps")
    if config.schedule.until < 1:
        until = config.schedule.until
        notes.append(f"schedule.until={until:g}: the last {_percent(1 - until)} of the steps are dense")
    if config.correction.every:
        notes.append(
            f"correction.every={config.correction.every}: 1 of {config.correction.every} steps that run all "
            "is dense and tells what merging loses on the others"
        )
    if config.reuse.every > 1:
        notes.append(
            f"reuse.every={config.reuse.every}: 1 of {config.reuse.every} steps runs all; in the others, "
            "the levels of a UNet below its finest, or the blocks of other models, do not run, and what they "
            "changed goes on in a straight line"
        )
        if config.reuse.shallow_every > 1:
            start = config.reuse.shallow_from
            notes.append(
                f"reuse.shallow_every={config.reuse.shallow_every}: of a UNet, 1 of "
                f"{config.reuse.shallow_every} steps runs the finest level, the others only its last layer"
                + (f"; reuse.shallow_from={start:g}: the first {_percent(start)} all run it" if start else "")
            )
        if config.reuse.span < 1:
            notes.append(
                f"reuse.span={config.reuse.span:g}: never longer than {_percent(config.reuse.span)} of the "
                "steps, so that short generations run more of them"
            )
    if config.plans.every > 1:
        notes.append(f"a plan is used for {config.plans.every} steps")
    if config.plans.blocks:
        notes.append("plans.blocks: neighbouring blocks with one token grid use one plan")
    if config.asks_guidance:
        notes.append(f"planner={config.guided_planner!r}: planned as 'tome' until a guided step was made")
    changes = config.schedule.changes_ratio or config.schedule.phases
    if changes or config.correction.every or config.reuse.every > 1:
        notes.append(
            "tokens and operations are those of the step that merges most; with a number of steps (--steps), "
            "their mean is counted too"
        )
    return notes


def _in_words(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in changes.items())


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
