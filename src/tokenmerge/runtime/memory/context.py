"""What holds for one call of a patched model, and where each thread keeps it."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenmerge.config import MergeSettings
from tokenmerge.models.base import Grid
from tokenmerge.models.parallel import Part
from tokenmerge.runtime.memory.caches import BlockMerge, Cache, Memory
from tokenmerge.runtime.memory.step_log import StepLog
from tokenmerge.runtime.steps.step_seed import StepSeed
from tokenmerge.runtime.steps.step_tracker import Decision


@dataclasses.dataclass(frozen=True, eq=False)
class CallContext:
    """What holds for one call of a patched model; built once, by the hook before the model.

    Blocks that are called without their model have that of its last call in their thread.

    Attributes:
        settings: settings of the running step, by level.
        step: number of the step that draws depend on, int64.
        call: number of the call in its step.
        plan_call: number of the call whose plans this one uses.
        caches_features: level and kind of features that are cached, for the plans of a later step.
        blocks_are_dense: whether blocks do what their classes do: in them nothing merges, is skipped or is
            cached.
        guidance_copies: how many times the batch holds each sample, for as many prompts.
        copies_equal: in a graph and on accelerators, whether it does hold equal samples; None: it does.
        guidance_difference: what guidance changed in the result of the last step; None: unknown.
        step_log: where blocks note what they merge; None: nobody asked for it.
    """

    settings: Mapping[int, MergeSettings]
    step: Tensor = dataclasses.field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    call: int = 0
    plan_call: int = 0
    caches_plans: bool = False
    caches_features: frozenset[tuple[int, str]] = frozenset()
    blocks_are_dense: bool = False
    decision: Decision = dataclasses.field(default_factory=Decision)
    guidance_copies: int = 1
    copies_equal: Tensor | None = None
    guidance_difference: Tensor | None = None
    step_log: StepLog | None = None


class ThreadState:
    """What belongs to a thread that calls a patched model.

    Attributes:
        context: what holds for the running call or the last one; it is given for blocks that are called
            before the model.
        grid: the model's finest token grid in that call.
        part: the part of the sequence that this process has in that call; None: all of it.
        own_memory: what is cached where settings do not follow the steps.
        memory: what that call caches.
        spans: by call and level, the image tokens that the first block was called with, followed by those
            that the last block returned, once it has run.
        running_blocks: the :class:`tokenmerge.runtime.blocks.block_runs.RunningBlocks`, if there are any.
    """

    def __init__(self, context: CallContext, groups: Sequence[Hashable]) -> None:
        self.context = context
        self.grid = Grid()
        self.part: Part | None = None
        self.seed = StepSeed()
        self.own_memory = Memory(groups)
        self.memory = Memory(())
        self.spans: dict[tuple[int, int, int], tuple[Tensor, ...]] = {}
        self.running_blocks: Any = None


class PartState:
    """What a block, a layer or a stage needs in the running call of a thread.

    Attributes:
        number: of a block, index of this call among its calls in one model forward; −1 before the first.
        running: of a block, what its running call merges; None between calls. It is known before the block
            runs where gradient checkpointing repeats a recorded call, and where a block that is compiled
            alone gets its plan from outside its graph. Otherwise the block itself finds out.
        counted: of a block that is compiled alone, whether its running call was numbered outside its graph.
    """

    def __init__(self) -> None:
        self.cache = Cache()
        self.number = -1
        self.running: BlockMerge | None = None
        self.counted = False
