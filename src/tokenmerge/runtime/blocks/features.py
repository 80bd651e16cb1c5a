"""Features of the step before, which planners compare: what a block, or all blocks of a level, added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenmerge.models.call import HostCall
from tokenmerge.runtime.memory.reuse import Residual
from tokenmerge.runtime.memory.state import BlockState


def caches_features(state: BlockState) -> bool:
    """Return whether something of a block's call is cached, for plans of a later step."""
    cached, level = state.model.context.caches_features, state.level
    own = state.plans_first and (level, "residual") in cached
    return own or ((state.is_first or state.is_last) and (level, "model_residual") in cached)


def with_cached_features(state: BlockState, call: HostCall, n: int, run: Callable[[], Any]) -> Any:
    """Return the result of a block, which ``run`` returns.

    What the block, or its level, adds to the n tokens of the image is cached.
    """
    cached, level, place = state.model.context.caches_features, state.level, (*state.call, state.level)
    before = state.threads.value.cache.residuals.get(state.call)
    thread = state.model.threads.value
    image = _image(state, call, n, state.layout.tokens_of(call))
    if state.is_first and (level, "model_residual") in cached:
        thread.spans[place] = (image,)
    result = run()
    single = isinstance(result, Tensor)
    made = _image(state, call, n, result if single else result[state.image_place])
    if state.plans_first and (level, "residual") in cached:
        _cache_residual(state, made, image, 0 if single else len(result), before)
    first, *_ = thread.spans.get(place, (None,))
    if state.is_last and first is not None:
        thread.memory.model_residuals.pop(place, None)
        if first.shape == made.shape:
            thread.memory.model_residuals[place] = made - first
            thread.spans[place] = (first, made)
    return result


def _cache_residual(
    state: BlockState, made: Tensor, image: Tensor, parts: int, before: Residual | None
) -> None:
    """Cache what a block has added to its image tokens, as one of ``parts`` tensors; 0: alone.

    If this call has cached another residual in the place of ``before``, that one is kept.
    """
    residuals = state.threads.value.cache.residuals
    if residuals.get(state.call) is not before:
        return
    residuals.pop(state.call, None)
    if made.shape == image.shape:
        added = made - image
        latest = tuple(added if i == state.image_place else None for i in range(parts)) or (added,)
        residuals[state.call] = Residual(not parts, latest)


def _image(state: BlockState, call: HostCall, n: int, x: Tensor) -> Tensor:
    """Return the n tokens of the image ``[b, n, c]`` in the input or the result of a block."""
    mask = call.argument(state.layout.padding) if state.layout.padding else None
    if mask is None and x.shape[1] == n:
        return x  # the very tensor, by which a run of blocks is recognised
    return state.layout.image(x, n, None if mask is None else mask.sum(dim=1) - n)


def compared(state: BlockState, features: str, x: Tensor, image: Tensor, start: Tensor | None) -> Tensor:
    """Return what planners compare: the cached features, or the image tokens where nothing is cached yet.

    ``x`` ``[b, text + n + padding, c]`` is the input of a block, and ``image`` ``[b, n, c]`` the image in it,
    which begins at ``start`` ``[b]``; None: where the layout says.
    """
    # Under gradients nothing is cached, and what was cached before is not used.
    if torch.compiler.is_compiling() or (state.level, features) not in state.model.context.caches_features:
        return image
    if features == "model_residual":
        added = state.model.threads.value.memory.model_residuals.get((*state.call, state.level))
    else:
        kept = state.threads.value.cache.residuals.get(state.call)
        added = None if kept is None else kept.latest[0 if kept.single else state.image_place]
    if added is not None and added.shape == x.shape:
        added = state.layout.image(added, image.shape[1], start)
    return image if added is None or added.shape != image.shape else added
