"""What settings mean over the steps of a generation: operations, memory, and a description."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from tokenmerge.config import Rule, StepReuse, ToMeConfig
from tokenmerge.models.base import Host
from tokenmerge.report.flops import count_flops
from tokenmerge.runtime.memory.reuse import Residual
from tokenmerge.runtime.memory.state import Kept, ModelState
from tokenmerge.runtime.patching.patch import new_state, patch_host, restore
from tokenmerge.runtime.steps.pipeline import Pipeline

# After two complete steps the cache of step reuse is largest. The second must not be one of the last steps.
_STEPS_TO_KEEP_MOST = 4

Arguments = Callable[[], dict[str, Any]]
_NOTHING = Kept()


def mean_flops(host: Host, config: ToMeConfig, steps: int, arguments: Arguments, kept: Kept) -> int:
    """Count the operations of a call, averaged over the steps of a generation.

    The model is not patched, and may be on the meta device. ``arguments`` returns new arguments of a call, by
    name, for each step. ``kept`` says which blocks and layers do not merge.
    """
    name = type(host.root).__name__
    counts: dict[tuple[object, ...], int] = {}
    total = 0
    with patched(host, config, kept) as state:

        def stop_if_known(root: nn.Module, args: tuple) -> None:
            kind.append(_kind_of_call(state))
            if kind[0] in counts:
                raise _Known

        host.root.register_forward_pre_hook(stop_if_known)
        for index in range(steps):
            state.pipeline.set_step(index, steps)
            kind: list[tuple[object, ...]] = []
            with contextlib.suppress(_Known):
                made = count_flops(host.root, arguments())[name]
                counts[kind[0]] = made
            total += counts[kind[0]]
    return round(total / steps)


class _Known(Exception):
    """Raised to stop a call whose operations have been counted before."""


def _kind_of_call(state: ModelState) -> tuple[object, ...]:
    """Return what the operations of the running call depend on, apart from the sizes of its arguments."""
    context, tracker = state.context, state.threads.value.memory.tracker
    plans = tracker.noted.get((tracker.call, "plans"), (tracker.index,))[0] == tracker.index
    return (
        # The first call has no correction to add, and no step before it.
        tracker.index == 0,
        plans,
        tuple(context.settings.items()),
        context.decision.merging,
        context.decision.runs,
        context.guidance_difference is None,
    )


def kept_bytes(host: Host, config: ToMeConfig, arguments: Arguments, kept: Kept = _NOTHING) -> int:
    """Count the bytes cached between steps: corrections, residuals and plans.

    The arguments are as for :func:`mean_flops`.
    """
    caches = config.correction.on or config.reuse.on or config.cached_features
    if config.plans.every == 1 and not caches:
        return 0
    keeping = dataclasses.replace(
        merging_most(config),
        plans=config.plans,
        correction=config.correction,
        reuse=_with_long_distances(config.reuse),
    )
    with patched(host, keeping, kept) as state:
        for index in range(2):
            state.pipeline.set_step(index, _STEPS_TO_KEEP_MOST)
            count_flops(host.root, arguments())
        memory = state.threads.value.memory
        tensors: list[Any] = list(memory.model_residuals.values())
        for cache in memory.caches:
            tensors += [
                tensor for one in (*cache.plans.values(), *cache.residuals.values()) for tensor in one
            ]
            skipped = [
                getattr(one, "residual", one) for one in cache.skippable.values()
            ]  # of runs and stages
            residuals = [one for one in skipped if isinstance(one, Residual)]
            tensors += [tensor for one in residuals for tensor in (*one.latest, *one.delta)]
        once = {id(tensor): tensor for tensor in tensors if isinstance(tensor, Tensor)}
        return sum(tensor.nbytes for tensor in once.values())


def merging_most(config: ToMeConfig) -> ToMeConfig:
    """Return what holds in the step that merges most."""
    return max(config.phases(), key=lambda phase: phase.ratio)


def _with_long_distances(reuse: StepReuse) -> StepReuse:
    """Step reuse with the same cache, in a generation of only a few steps."""
    every = _STEPS_TO_KEEP_MOST if reuse.on else 1
    return StepReuse(every=every, shallow_every=every if reuse.skips_finest else 1)


@contextlib.contextmanager
def patched(host: Host, config: ToMeConfig, kept: Kept) -> Iterator[ModelState]:
    """Within the context, patch a host that is not patched."""
    state = new_state(host, config, Pipeline())
    state.kept = kept
    patch_host(host, state)
    try:
        yield state
    finally:
        restore(host.root)


def notes_on_steps(config: ToMeConfig, steps: int | None = None) -> list[str]:
    """Describe what differs between levels and between steps. ``steps`` is their number; None: unknown."""
    notes = [f"{_where(rule)}: {_what(rule)}" for rule in config.rules]
    if config.correction.on:
        every = config.correction.every
        notes.append(
            f"correction.every={every}: 1 of {every} complete steps merges nothing; the others add back the "
            "detail that merging would have lost there"
        )
    if config.reuse.on:
        notes += _notes_on_reuse(config.reuse, steps)
    if config.plans.every > 1:
        notes.append(f"a plan is used for {config.plans.every} steps")
    if config.plans.blocks:
        notes.append("consecutive blocks with the same token grid share a plan")
    if config.cached_features:
        what = "all blocks of a level" if config.cached_features == "model_residual" else "each block"
        notes.append(
            f"features={config.cached_features!r}: plans compare what {what} added at the step before; the "
            "first step compares the inputs of blocks"
        )
    if config.guided_planner:
        notes.append(
            f"planner={config.guided_planner!r}: the planner 'tome' runs until the first guided step is done"
        )
    if any(rule.of_steps for rule in config.rules) or config.correction.on or config.reuse.on:
        which = "the step that merges most" if config.merges else "a step that runs the whole model"
        more = "; pass a number of steps (--steps) to count the mean operations too"
        notes.append(f"tokens and operations are those of {which}{'' if steps else more}")
    return notes


def _notes_on_reuse(reuse: StepReuse, steps: int | None) -> list[str]:
    skipped = (
        "the others skip the levels of a UNet below its finest, or the blocks of other models, and "
        "extrapolate their outputs linearly"
    )
    if reuse.full_steps:
        if steps:
            complete = ", ".join(map(str, reuse.steps_of(steps).full))
            return [f"of the steps 0 to {steps - 1}, these run all blocks: {complete}; {skipped}"]
        places = ", ".join(f"{100 * place:.0f} %" for place in reuse.full_steps)
        return [f"reuse.full_steps: steps at {places} of the way run all blocks; {skipped}"]
    notes = [f"{reuse.given}: 1 of {reuse.every:g} steps runs all blocks; {skipped}"]
    if reuse.shallow_every > 1:
        notes.append(
            f"reuse.shallow_every={reuse.shallow_every:g}: 1 of {reuse.shallow_every:g} steps runs the "
            "finest level of a UNet, the others skip it too"
        )
    return notes


def _where(rule: Rule) -> str:
    """Describe the level and the steps in which a rule holds."""
    where = [] if rule.level is None else [f"level {rule.level}"]
    start, until = (f"{100 * share:.3g} %" for share in (rule.start, rule.until))
    if rule.start > 0:
        end = "of the steps on" if rule.until == 1 else f"to {until} of the steps"
        where.append(f"from {start} {end}")
    elif rule.until < 1:
        where.append(f"in the first {until} of the steps")
    return ", ".join(where)


def _what(rule: Rule) -> str:
    if rule.level is None and rule.changes.get("ratio") == 0 and "reuse.every" in rule.changes:
        return "nothing merges, and nothing is skipped"
    return ", ".join(f"{name}={value}" for name, value in rule.changes.items())
