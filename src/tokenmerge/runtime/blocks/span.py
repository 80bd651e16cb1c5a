"""Modules that a model without described blocks skips together: the blocks of lists, or the model itself.

On a step that skips them, the last module returns an extrapolated result, and the others return tensors that
no running module reads. A result may hold several tensors, in any structure, and each is extrapolated by
itself. Where the first module was called with a tensor of its shape, what the modules add to that one is
extrapolated, and otherwise the tensor of the result. Nothing is known of the layout of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.call import HostMethod
from tokenmerge.ops.once import version_of
from tokenmerge.runtime.blocks.forward import compiled_attribute
from tokenmerge.runtime.blocks.skipping import note_forecast
from tokenmerge.runtime.memory.caches import SpanResult, extrapolated, updated
from tokenmerge.runtime.memory.state import STATE, ModelState, SpanState

Inputs = Sequence[tuple[Tensor, int | None]]  # of the first module, each with the number of its changes


def span_call(original: HostMethod) -> Callable:
    """Make the method of a module that is skipped with others: on some steps, none of them runs."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a module that is compiled alone is skipped outside its graph
            return original.of(self)(*args, **kwargs)
        return _unless_skipped(self, original.of(self), *args, **kwargs)

    return forward


def compiled_span() -> property:
    """Return the attribute in which a compiled module has its graph, which some steps do not call."""
    return compiled_attribute(_unless_skipped)


def _unless_skipped(module: nn.Module, run: Callable, *args: Any, **kwargs: Any) -> Any:
    """Run a module, or return what takes the place of its result in a step that skips it."""
    state: SpanState | ModelState | None = module.__dict__.get(STATE)
    if isinstance(state, ModelState):  # of the model itself
        state = next((part for part in state.parts if isinstance(part, SpanState)), None)
    if state is None or torch.compiler.is_compiling() or not state.model.context.decision.caches:
        return run(*args, **kwargs)
    context = state.model.context
    thread = state.model.threads.value
    part = state.threads.value
    part.number += 1
    call = context.call, part.number
    distance = context.decision.deep
    known: Any = part.cache.skippable.get(call)
    if state.is_first:
        numbers = (leaf for leaf in tree_leaves((args, kwargs)) if _is_numbers(leaf))
        thread.inputs[call] = [(leaf, version_of(leaf)) for leaf in numbers]
    if not state.is_last:
        if distance is not None and known is not None:
            return tree_map_only(Tensor, torch.zeros_like, known)
        result = run(*args, **kwargs)
        part.cache.skippable[call] = tree_map_only(Tensor, _without_memory, result)
        return result
    if distance is not None and known is not None:
        return _extrapolated(known, thread.inputs.pop(call, ()), distance, context.samples)
    result = run(*args, **kwargs)
    part.cache.skippable[call] = _noted(state, known, result, thread.inputs.pop(call, ()))
    results = [made for made in part.cache.skippable.values() if isinstance(made, SpanResult)]
    state.model.cached_bytes = sum(made.nbytes for made in results)
    thread.ran.add("deep")
    return result


def _noted(state: SpanState, known: SpanResult | None, result: Any, inputs: Inputs) -> SpanResult:
    """Return what is cached of a result, with how it changed since the run before."""
    leaves, structure = tree_flatten(result)
    places = tuple(place for place, leaf in enumerate(leaves) if _is_numbers(leaf))
    if not places:
        name = state.path or "the model"
        raise UnsupportedModelError(
            f"{name} returned {type(result).__name__}, in which step reuse finds no tensor to extrapolate; "
            "run it without token merging"
        )
    results = [leaves[place] for place in places]
    bases = _bases(results, inputs)
    thread = state.model.threads.value
    context = state.model.context
    added = tuple(
        # A copy, since hosts change results in place.
        _by_sample(result.clone() if base is None else result - inputs[base][0], context.samples)
        for result, base in zip(results, bases, strict=True)
    )
    # Another structure, or other inputs, begin anew.
    fits = known is not None and (known.structure, known.places, known.bases) == (structure, places, bases)
    before = known.residual if known is not None and fits else None
    note_forecast(thread, "deep", before, added[0])
    shard = thread.shard if state.path else None  # a whole model has the tokens of all devices
    kept = [None if place in places else leaf for place, leaf in enumerate(leaves)]
    shapes = tuple(result.shape for result in results)
    return SpanResult(structure, kept, places, shapes, bases, updated(before, added, shard))


def _extrapolated(known: SpanResult, inputs: Inputs, distance: Tensor, samples: int) -> Any:
    """Return the result of a step that skips the modules."""
    leaves = list(known.leaves)
    values = extrapolated(known.residual, [0.0] * len(known.places), distance)
    for place, shape, base, value in zip(known.places, known.shapes, known.bases, values, strict=True):
        value = _in_shape(value, shape, samples)
        leaves[place] = value if base is None else inputs[base][0] + value
    return tree_unflatten(leaves, known.structure)


def _bases(results: Sequence[Tensor], inputs: Inputs) -> tuple[int | None, ...]:
    """Return for each tensor of a result the index of an input of its shape, a different one for each."""
    # What hosts have changed in place is lost, and in inference mode nobody counts changes.
    usable = {
        index: tensor
        for index, (tensor, changes) in enumerate(inputs)
        if changes is not None and version_of(tensor) == changes
    }
    bases: list[int | None] = []
    for result in results:
        kind = result.shape, result.dtype, result.device
        base = next((i for i, one in usable.items() if (one.shape, one.dtype, one.device) == kind), None)
        if base is not None:
            del usable[base]
        bases.append(base)
    return tuple(bases)


def _by_sample(tensor: Tensor, samples: int) -> Tensor:
    """Return a tensor with the samples of the model's call along its first axis, as far as they are found.

    Some models have them along the second axis. Others fold frames into the first one, beside each other for
    each sample. Where they are not found, all of the tensor counts as one sample.
    """
    if _is_second_axis(tensor.shape, samples):
        return tensor.movedim(1, 0)
    return tensor.reshape(1 if len(tensor) % samples else samples, -1, *tensor.shape[1:])


def _in_shape(tensor: Tensor, shape: torch.Size, samples: int) -> Tensor:
    """Undo :func:`_by_sample` for a tensor that had this shape."""
    return tensor.movedim(0, 1) if _is_second_axis(shape, samples) else tensor.reshape(shape)


def _is_second_axis(shape: torch.Size, samples: int) -> bool:
    return len(shape) > 1 and shape[0] != samples and shape[1] == samples


def _is_numbers(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim > 0


def _without_memory(tensor: Tensor) -> Tensor:
    return tensor.new_empty(()).expand(tensor.shape)
