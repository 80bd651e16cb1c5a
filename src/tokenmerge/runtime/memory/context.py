"""What holds for one call of a patched model, and where each thread keeps it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenmerge.config import MergeSettings, ToMeConfig
from tokenmerge.models.layout import Grid
from tokenmerge.models.parallel import Part
from tokenmerge.ops import Plan
from tokenmerge.runtime.memory.caches import BlockRun, Cache, Call, Memory, RecordedCall
from tokenmerge.runtime.memory.step_log import StepLog
from tokenmerge.runtime.steps.decide import Decision
from tokenmerge.runtime.steps.step_seed import StepSeed


@dataclasses.dataclass(frozen=True, eq=False)
class CallContext:
    """What holds for one call of a patched model; built once, by the hook before the model.

    Blocks that are called without their model have that of its last call in their thread.

    Attributes:
        config: what was asked for, at the guidance scale of the generation.
        settings: what holds at the running step, by level.
        step: the number of the step that draws depend on, int64.
        call: number of the call in its step.
        plan_call: number of the call whose plans this one uses.
        caches_plans: whether plans are cached for later calls.
        caches_features: level and kind of features that are cached, for the plans of a later step.
        decision: what runs and what merges.
        guidance_copies: how many times the batch holds each sample, for as many prompts.
        copies_equal: in a graph and on accelerators, whether it does hold equal samples; None: it does.
        guidance_difference: what guidance changed in the result of the last step; None: unknown.
        step_log: where blocks note what they merge; None: nobody asked for it.
    """

    config: ToMeConfig
    settings: Mapping[int, MergeSettings]
    step: Tensor = dataclasses.field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    call: int = 0
    plan_call: int = 0
    caches_plans: bool = False
    caches_features: frozenset[tuple[int, str]] = frozenset()
    decision: Decision = dataclasses.field(default_factory=Decision)
    guidance_copies: int = 1
    copies_equal: Tensor | None = None
    guidance_difference: Tensor | None = None
    step_log: StepLog | None = None


class RunningBlocks:
    """Blocks that have run one after another, each with the very tensors that the one before it returned.

    Args:
        first: cache of the first block, its call, and what was known of the run before.
        start: tokens of the image and of the text that it was called with.

    Attributes:
        end: tokens of the image and of the text that the last block returned.
        blocks: that have run.
    """

    def __init__(self, first: tuple[Cache, Call, BlockRun | None], start: tuple[Tensor, Any]) -> None:
        self.first, self.start = first, start
        self.end: tuple[Tensor, Any] = start
        self.blocks = 0
        self._version: int | None = None

    def end_with(self, image: Tensor, text: Any) -> None:
        """Note what a block returned; blocks without text of their own pass it on."""
        self.end = image, self.end[1] if text is None else text
        self.blocks += 1
        self._version = _version(image)

    def goes_on_with(self, image: Tensor, text: Any) -> bool:
        """Return whether a block is called with what the last one returned, unchanged."""
        known = self.end[1]
        return image is self.end[0] and _version(image) == self._version and (text is known or text is None)


def _version(tensor: Tensor) -> int | None:
    """Return how often a tensor was changed in place; None where it is not counted."""
    return None if tensor.is_inference() else tensor._version


class ThreadState:
    """What belongs to a thread that calls a patched model.

    Args:
        context: for blocks that are called before the model.
        groups: as for :class:`tokenmerge.runtime.memory.caches.Memory`.

    Attributes:
        context: of the running call, or the last one.
        grid: the model's finest token grid in that call.
        part: the part of the sequence that this process has in that call; None: all of it.
        seed: makes the numbers of steps.
        own_memory: what is cached where settings do not follow the steps.
        memory: what the running call caches; None before the first.
        spans: by call and level, the image tokens that the first block was called with, followed by those
            that the last block returned, once it has run.
        running_blocks: blocks of a complete step whose residual is cached; None: there are none.
    """

    def __init__(self, context: CallContext, groups: Sequence[int]) -> None:
        self.context = context
        self.grid = Grid()
        self.part: Part | None = None
        self.seed = StepSeed()
        self.own_memory = Memory(groups)
        self.memory: Memory | None = None
        self.spans: dict[tuple[int, int, int], tuple[Tensor, ...]] = {}
        self.running_blocks: RunningBlocks | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class ActiveMerge:
    """What a block merges in its running call.

    Attributes:
        images: number of images in its input.
        tokens: number of tokens of each, padding included.
        plan: which tokens merge; None on a correction step, which measures what merging would lose.
    """

    images: int
    tokens: int
    plan: Plan | None


class PartState:
    """What a block, a layer or a stage needs in the running call of a thread.

    Attributes:
        cache: what it caches between calls.
        number: of a block, index of this call among its calls in one model forward; −1 before the first.
        merge: of a block, what it merges while it runs; None: nothing.
        known: of a block, what its running call merges, where that is known before it runs: gradient
            checkpointing recomputes a recorded call, and a block that is compiled alone gets its plan from
            outside its graph. None: the block itself finds out.
        counted: of a block that is compiled alone, whether its running call was numbered outside its graph.
    """

    def __init__(self) -> None:
        self.cache = Cache()
        self.number = -1
        self.merge: ActiveMerge | None = None
        self.known: RecordedCall | None = None
        self.counted = False
