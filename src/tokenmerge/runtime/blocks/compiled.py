"""Blocks that are compiled alone: what is cached between calls stays outside of their graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tokenmerge.config import CACHED_FEATURES
from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.call import HostCall
from tokenmerge.models.parallel import splits_tokens
from tokenmerge.runtime.blocks.features import caches_features
from tokenmerge.runtime.blocks.forward import count_call, is_skipped, with_caches
from tokenmerge.runtime.blocks.planning import active_call
from tokenmerge.runtime.memory.state import STATE, BlockState

# Where ``nn.Module.compile`` leaves what a module runs instead of its ``forward``.
COMPILED = "_compiled_call_impl"


def compiled_block(names: Callable[[], Sequence[str]]) -> property:
    """Return the attribute in which a compiled block has its graph; the graph is called with a plan.

    If other calls use the plan too, it is an input of the graph. Otherwise there would be two graphs: one
    that makes a plan, and one that takes a plan from another call. ``names`` returns the names of the
    parameters of the block's ``forward``, in order.
    """

    def call_graph(self: nn.Module, graph: Callable, *args: Any, **kwargs: Any) -> Any:
        state: BlockState | None = self.__dict__.get(STATE)
        if state is None or torch.compiler.is_compiling():
            return graph(*args, **kwargs)
        outside = _plans_outside(state)
        if not (outside or is_skipped(state) or caches_features(state)):
            return graph(*args, **kwargs)
        if splits_tokens(self):
            raise UnsupportedModelError(
                f"{state.path}: context parallelism splits tokens inside the graph of this block, and "
                "what is cached between calls is for the part of each device; leave the model uncompiled, or "
                "take reuse.every=1, plans.every=1, plans.blocks=False, plans.guidance=False, "
                "features='input', and no patch.record_steps()"
            )
        count_call(state)
        block, call = state.threads.value, HostCall(graph, names(), args, kwargs)

        def run_graph() -> Any:
            block.running = active_call(state, call) if outside else None
            block.counted = True
            try:
                return graph(*args, **kwargs)
            finally:
                block.running, block.counted = None, False

        return with_caches(state, call, run_graph)

    def get(self: nn.Module) -> Callable | None:
        graph = self.__dict__.get(COMPILED)
        return None if graph is None else functools.partial(call_graph, self, graph)

    def put(self: nn.Module, graph: Callable | None) -> None:
        self.__dict__[COMPILED] = graph

    return property(get, put)


def _plans_outside(state: BlockState) -> bool:
    """Return whether the next call of a compiled block takes its plan as an input of the graph.

    A plan that serves one call is better made in the graph, where its operations are fused. A plan that the
    step log counts has to be made outside.
    """
    settings, context = state.settings, state.model.context
    reads_cache = settings.features in CACHED_FEATURES  # what is cached is read outside the graph
    return context.caches_plans or context.step_log is not None or reads_cache
