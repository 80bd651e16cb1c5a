"""The caches of a patched model between calls, for tests of what they hold and when it is dropped."""

from __future__ import annotations

from typing import Any

from torch import nn

from tokenmerge.runtime.memory.caches import Cache
from tokenmerge.runtime.memory.state import BlockState, Memory
from tokenmerge.runtime.patching.patch import state_of


def memory_of(model: nn.Module) -> Memory:
    """The memory of the latest call in this thread; an empty one before the first call."""
    state = state_of(model)
    memory = state.threads.value.memory
    return memory if memory.caches else Memory(state.groups)


def caches(model: nn.Module, kind: type = object) -> list[tuple[Any, Cache]]:
    """The parts of one kind in a model, each with its cache."""
    pairs = zip(state_of(model).parts, memory_of(model).caches, strict=True)
    return [(part, cache) for part, cache in pairs if isinstance(part, kind)]


def plans(model: nn.Module) -> list[Any]:
    """The cached plans of each block."""
    return [cache.plans for _, cache in caches(model, BlockState)]


def everything(memory: Memory) -> list[Any]:
    """All that is cached."""
    return [
        *(
            value
            for cache in memory.caches
            for kept in vars(cache).values()
            if isinstance(kept, dict)
            for value in kept.values()
        ),
        *(key for key in memory.tracker.noted if key[1] in ("deep", "finest")),
        *memory.guidance_differences.values(),
        *memory.model_residuals.values(),
        *([] if memory.sample.result is None else [memory.sample.result]),
    ]
