"""What a patched model caches between calls, for tests that see that it is there, and gone."""

from __future__ import annotations

from typing import Any

from torch import nn

from tokenmerge.runtime.caches import Cache, Memory
from tokenmerge.runtime.patch import state_of
from tokenmerge.runtime.state import BlockState


def memory_of(model: nn.Module) -> Memory:
    """What the latest call of this thread caches in; an empty one before the first."""
    state = state_of(model)
    return state.threads.value.memory or Memory(state.groups)


def caches(model: nn.Module, kind: type = object) -> list[tuple[Any, Cache]]:
    """The parts of a model of one kind, each with what it caches."""
    pairs = zip(state_of(model).parts, memory_of(model).caches, strict=True)
    return [(part, cache) for part, cache in pairs if isinstance(part, kind)]


def plans(model: nn.Module) -> list[Any]:
    """The cached plans of each block."""
    return [cache.plans for _, cache in caches(model, BlockState)]


def everything(memory: Memory) -> list[Any]:
    """All that is cached."""
    return [
        *(value for cache in memory.caches for kept in vars(cache).values() for value in kept.values()),
        *memory.tracker.ran,
        *memory.guidance_differences.values(),
        *memory.deviations.values(),
        *memory.skips.values(),
        *memory.model_residuals.values(),
        *([] if memory.sample.result is None else [memory.sample.result]),
    ]
