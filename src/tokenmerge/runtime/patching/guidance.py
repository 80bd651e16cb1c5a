"""Classifier-free guidance: copies of each sample in a batch, and what guidance changed in a result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenmerge.runtime.memory.state import CallContext, Memory
from tokenmerge.runtime.patching.call_facts import CallFacts
from tokenmerge.runtime.steps.pipeline import guidance_copies
from tokenmerge.runtime.steps.scheduler import needs_sync


def copies_in_batch(facts: CallFacts, memory: Memory) -> tuple[int, Tensor | None]:
    """Return how many copies of each sample the batch holds, and a tensor that says whether they are equal.

    The tensor is there only where reading it would synchronise the device.
    """
    expected = 1 if facts.pipe is None else guidance_copies(facts.pipe)
    if expected == 1:
        return 1, None
    state = facts.state
    latents = state.call.latents(facts.root, facts.sample)
    # With the answer, copies need no positions of their own, which would take a call of attention for each.
    asks = state.follows_steps or state.shares_positions
    if asks and needs_sync(latents[0]) and not torch.compiler.is_compiling():
        question = (expected, len(facts.sample), *facts.sample[0].shape)
        equal = memory.tracker.answer(question, lambda: bool(_copies_are_equal(latents, expected)))
        return (expected if equal else 1), None
    found = _copies_are_equal(latents, expected)
    if found is not None and needs_sync(found):
        return expected, found
    return (expected if found else 1), None


def _copies_are_equal(sample: Tensor | Sequence[Tensor], copies: int) -> Tensor | None:
    """Return whether a batch holds the same samples several times, as a tensor, or None if it cannot."""
    images, others = divmod(len(sample), copies)
    if others or sample[0].is_meta:
        return None
    pairs = [(sample[i], sample[i % images]) for i in range(images, len(sample))]
    if any(copy.shape != first.shape for copy, first in pairs):
        return None
    return torch.stack([(copy == first).all() for copy, first in pairs]).all()


def note_guidance(memory: Memory, context: CallContext, result: Any) -> None:
    """Note what guidance changed in the result of a call, for planners that compare it at the next step."""
    # Several images, or what a ControlNet adds to each level, cannot be compared.
    if not isinstance(result, Tensor):
        return
    made = result.detach()
    sample = memory.sample
    if context.guidance_copies > 1:
        unguided, guided, *_ = made.chunk(context.guidance_copies)
        memory.guidance_differences[context.plan_call] = guided - unguided
        return
    if sample.repeated and sample.result is not None:
        memory.guidance_differences[context.plan_call] = made - sample.result
    if sample.last is not None:
        sample.result = made
