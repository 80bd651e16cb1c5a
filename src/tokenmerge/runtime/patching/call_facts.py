"""What is known of a call of a patched model as it begins: its sample, its step and its generation."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tokenmerge.config.origin import instead
from tokenmerge.errors import ConfigError, UnsupportedModelError
from tokenmerge.ops.once import first_numbers
from tokenmerge.runtime.memory.state import Memory, ModelState
from tokenmerge.runtime.steps.added_noise import noise_before
from tokenmerge.runtime.steps.callbacks import calls_back, has_callback
from tokenmerge.runtime.steps.calls import Given, Shape, conditions_in, detail_of, noise_in_detail
from tokenmerge.runtime.steps.pipeline import running_pipeline
from tokenmerge.runtime.steps.scheduler import (
    DenoisingStep,
    comes_later,
    has_run,
    is_over,
    is_timestep_of,
    needs_sync,
    repeats,
    scheduler_of,
)
from tokenmerge.runtime.steps.step_tracker import number_of, same_step, step_seed


class CallFacts(NamedTuple):
    """What is known of a call of a patched model as it begins."""

    state: ModelState
    root: nn.Module
    arguments: Mapping[str, Any]  # by their names; a graph holds none
    sample: Any
    timestep: Any
    seed: Tensor  # the number of the step that draws depend on
    running: Any  # the pipeline on the call stack, or None
    pipe: Any  # the pipeline of the call, with its scheduler, or None if it is unknown
    scheduler: Any
    step: DenoisingStep | None  # None where the settings do not follow the steps
    shape: Shape  # of the inputs; what is cached for one shape does not fit another
    given: Given | None  # by which the call is recognised, where it had to be known already


def facts_of_call(state: ModelState, root: nn.Module, arguments: Mapping[str, Any]) -> CallFacts | None:
    """Return what is known of a call with these arguments, or None if it belongs to no step."""
    sample = arguments[state.call.sample]
    place = state.call.timestep
    timestep = arguments[place] if isinstance(place, str) else place(root, arguments)
    seed = _seed_of(state, timestep, sample[0].device)
    running = running_pipeline()
    pipe = state.pipeline.of_call(running)
    scheduler: Any = None
    if not torch.compiler.is_compiling():
        scheduler = None if pipe is None else scheduler_of(pipe, timestep)
    step = None
    if state.follows_steps:
        _refuse_one_graph(state)
        if state.call.fills_cache is not None and state.call.fills_cache(arguments):
            _note_fill(state, scheduler, timestep, pipe is running, running)
            return None
        if not state.pipeline.step_is_given and calls_back(running):
            return None
        step = state.pipeline.step(scheduler, timestep, pipe is running, running)
        if _belongs_to_no_step(state, scheduler, step, timestep, seed):
            return None
        if step is None:
            raise _unknown_step(state)
        if state.threads.value.fills and not state.pipeline.memories_of(step.generation):
            step.generation.begin_after_filling(step.index)
    if state.call.described:
        shape = _shape_of(arguments, sample, with_text=state.follows_steps)
    else:
        # Nobody knows what each input changes in a result, so the shapes of all of them count.
        inputs = tree_leaves(dict(arguments))
        shape = tuple(leaf.shape for leaf in inputs if isinstance(leaf, Tensor))
    # A graph that held them would take all of them as inputs, and be made anew for other sizes of them.
    held = {} if torch.compiler.is_compiling() else arguments
    facts = CallFacts(
        state, root, held, sample, timestep, seed, running, pipe, scheduler, step, shape, given=None
    )
    known = None if step is None else state.memories.get(step.generation)
    if step is None or known is None or known.tracker.index != step.index:
        return facts
    given = given_of(facts, known)
    if known.tracker.numbers.is_after_step(given):
        return None
    return facts._replace(given=given)


def given_of(facts: CallFacts, memory: Memory) -> Given:
    """Return what a call is given, by which it is recognised.

    Samples are compared on a CPU. On a device, that waits for it: there they are compared where something
    else than the scheduler may move them, which are tiles, of which a step has several, and callbacks.
    """
    sample = facts.sample
    waits = needs_sync(sample[0])
    assert facts.step is not None
    noise = None
    # LEDITS++ gives the steps noise of its own, of any size.
    if not hasattr(facts.pipe or facts.running, "zs"):
        noise = noise_before(facts.step, facts.scheduler, facts.timestep)
    given = Given(
        facts.shape,
        conditions_in({name: value for name, value in facts.arguments.items() if value is not sample}),
        weakref.ref(sample) if isinstance(sample, Tensor) else None,
        waits=waits,
        noise=None if noise is None else noise_in_detail(sample, noise),
    )
    if not waits or memory.tracker.numbers.compares(given) or has_callback(facts.pipe):
        return dataclasses.replace(given, detail=detail_of(sample))
    return given


def _seed_of(state: ModelState, timestep: Any, device: torch.device) -> Tensor:
    """Return the number of the step that draws depend on."""
    if state.numbers_steps:
        return step_seed(timestep, device, state.threads.value.numbers)
    return first_numbers(1, device)[0]  # without a launch


def _shape_of(arguments: Mapping[str, Any], sample: Any, with_text: bool) -> Shape:
    """Return the shape of the inputs of a call: of its sample, and of its text where that counts."""
    shape = (len(sample), *sample[0].shape)
    if not with_text:  # a graph would be made anew for each size of a text that it looks at
        return shape
    text = arguments.get("encoder_hidden_states")
    if isinstance(text, Tensor):
        # Joint blocks change it too, and its length may differ at the next step.
        return (*shape, *text.shape)
    return shape


def _note_fill(state: ModelState, scheduler: Any, timestep: Any, runs_here: bool, running: Any) -> None:
    """Note a call that fills a cache for later ones, with its step if it is in one."""
    state.threads.value.fills += 1
    with contextlib.suppress(ConfigError):  # a scheduler of another thread
        state.pipeline.step(scheduler, timestep, runs_here, running)


def _refuse_one_graph(state: ModelState) -> None:
    """Refuse a call that is traced into one graph, by settings that follow the steps."""
    if torch.compiler.is_compiling():
        raise UnsupportedModelError(
            f"{state.over_steps}: what follows the denoising steps cannot be compiled into one graph "
            "with the whole model; compile its blocks: model.compile_repeated_blocks()"
        )


def _unknown_step(state: ModelState) -> ConfigError:
    """Return the error of a call whose step is unknown."""
    return ConfigError(
        f"{state.over_steps}: cannot tell the denoising step, since no scheduler has it; apply "
        "token merging to the pipeline that runs instead of its model, call "
        "patch.at_step(i, steps) before each step of a loop of your own, or "
        f"{instead(state.method, 'leave that setting out')}"
    )


def _belongs_to_no_step(
    state: ModelState, scheduler: Any, step: DenoisingStep | None, timestep: Any, seed: Tensor
) -> bool:
    """Return whether a call is beside the steps of a generation, such as one that a callback makes.

    Its timestep belongs to a step that is over, or not to the step in which it is made.
    """
    known = None if step is None else state.memories.get(step.generation)
    if state.pipeline.step_is_given:
        if step is not None and known is not None and _differs(known, step, seed):
            raise _over(step)
        return False
    if step is None:
        return _is_after_generation(state, scheduler, timestep)
    if step.by_frames:  # the highest timestep stays the same while later frames begin
        return False
    if is_over(scheduler, timestep, step.index):
        return True
    if known is None or known.seed is None:
        return False
    if not _differs(known, step, seed):
        return _repeats_last_step(known, scheduler, step, seed)
    return _is_of_another_step(known, scheduler, step, seed)


def _is_after_generation(state: ModelState, scheduler: Any, timestep: Any) -> bool:
    """Return whether a call comes after the generation that its scheduler has run, and warn of a loop."""
    if not has_run(scheduler):
        return False
    if is_over(scheduler, timestep, len(scheduler.timesteps)):
        return True
    state.warn_once(
        f"{state.over_steps}: a call belongs to no step of the scheduler, whose generation is over, and "
        "runs dense; before each step of a loop of your own, call patch.at_step(i, steps)"
    )
    return True


def _repeats_last_step(known: Memory, scheduler: Any, step: DenoisingStep, seed: Tensor) -> bool:
    """Return whether the first call of a step has the timestep of the step before, which is over."""
    if known.seed is None or step.index != known.tracker.index + 1:
        return False
    can_compare = known.seed is seed or not needs_sync(seed)
    return can_compare and same_step(known.seed, seed) and not repeats(scheduler, step.index)


def _is_of_another_step(known: Memory, scheduler: Any, step: DenoisingStep, seed: Tensor) -> bool:
    """Return whether a call with another timestep than the one before in its step is of another step.

    Reading the two timesteps waits for the device.
    """
    assert known.seed is not None
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
    """Return the error of a call whose timestep is of an earlier or a later step."""
    return ConfigError(
        f"step {step.index} of {step.total} is over, by the timestep that the model is called with; "
        "call patch.at_step(i, steps) before each step of a loop of your own, or apply token merging "
        "to the very pipeline that runs: others that share its models have schedulers of their own"
    )
