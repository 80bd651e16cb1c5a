"""Gradient checkpointing, which runs blocks again: they merge by the same plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenmerge.models.call import HostCall
from tokenmerge.runtime.memory.caches import RecordedCall
from tokenmerge.runtime.memory.state import BlockState


def with_gradients(state: BlockState, call: HostCall, run: Callable[[], Any]) -> Any:
    """Return the result of a block, which ``run`` returns, under gradients."""
    block = state.threads.value
    if block.known is None:
        block.known = state.calls.get(state.layout.tokens_of(call))
    try:
        return run()
    finally:
        block.known = None


def record(state: BlockState, call: HostCall, merged: RecordedCall) -> None:
    """Record what a call merges, for the call that recomputes it."""
    state.calls[state.layout.tokens_of(call)] = merged
