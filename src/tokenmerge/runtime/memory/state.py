"""The state of a patched model, its blocks, layers and stages: facts, and what threads hold."""

from __future__ import annotations

import dataclasses
import functools
import sys
import warnings
from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenmerge.config import MergeSettings, ToMeConfig
from tokenmerge.config.checks import integer
from tokenmerge.config.origin import named
from tokenmerge.errors import ConfigError, shown
from tokenmerge.models.base import Grid, Layer, Layout, ModelCall
from tokenmerge.models.placement import Part
from tokenmerge.ops.plan import Plan
from tokenmerge.runtime.memory.caches import BlockMerge, Cache, Call, Memory, WeakDictionary
from tokenmerge.runtime.memory.run_log import RunLog
from tokenmerge.runtime.memory.step_log import StepLog, StepRecorder
from tokenmerge.runtime.steps.guidance import StepSeed
from tokenmerge.runtime.steps.pipeline import PerThread, Pipeline
from tokenmerge.runtime.steps.scheduler import Generation
from tokenmerge.runtime.steps.step_tracker import Decision

# Packages through which a call reaches this one.
_NOT_THE_CALLER = ("tokenmerge", "torch", "diffusers", "contextlib")
# The one attribute that a patched module has beside its own: one of the classes of this file, or the grids of
# a module around blocks.
STATE = "_tokenmerge"


@dataclasses.dataclass(frozen=True)
class RecordedPlan:
    """A plan and the token grids (frames, rows, columns) that it is for.

    A sequence that also holds reference pictures has them behind the picture being made, whose grid is
    ``grid``.
    """

    plan: Plan
    grid: tuple[int, int, int]
    references: tuple[tuple[int, int, int], ...] = ()


class Kept(NamedTuple):
    """What other people's code that looks into a model changes in a generation.

    The blocks and layers with the paths ``dense`` do not merge in it. The ``note`` says so in a line; empty:
    nothing changes.
    """

    config: ToMeConfig = ToMeConfig()
    dense: frozenset[str] = frozenset()
    note: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class CallContext:
    """What holds for one call of a patched model; built once, by the hook before the model.

    Blocks that are called without their model have that of its last call in their thread.

    Attributes:
        settings: those of the running step, by level.
        seed: the number that draws of the step depend on, int64.
        call: number of the call in its step; ``plan_call``: of the call whose plans this one uses.
        caches_features: level and kind of features that are cached, for the plans of a later step.
        blocks_are_dense: whether nothing merges, is skipped or is cached in blocks.
        guidance_copies: how many times the batch holds each sample, for as many prompts.
        copies_equal: in a graph and on accelerators, whether it does hold equal samples; None: it does.
        guidance_difference: what guidance changed in the result of the last step; None: unknown.
        step_log: where blocks note what they merge; None: nobody asked for it.
    """

    settings: Mapping[int, MergeSettings]
    seed: Tensor = dataclasses.field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
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
        context: what holds for the running call or the last one; before the first, what blocks find that are
            called without their model.
        grid: the model's finest token grid in that call.
        part: the part of the sequence that this process has in that call; None: all of it.
        own_memory: what is cached where settings do not follow the steps.
        memory: what that call caches.
        spans: by call and level, the image tokens that the first block was called with, followed by those
            that the last block returned, once it has run.
        running_blocks: the :class:`tokenmerge.runtime.blocks.skipping.RunningBlocks`, if there are any.
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


@dataclasses.dataclass(eq=False)
class ModelState:
    """A patched model.

    Attributes:
        config: the settings; of the default method, what any of its generations may do.
        phases: (level, what holds there) for each level that merges and each phase, where it merges most.
        groups: for each of ``parts``, the group of parts that share its plans.
        dense_if_too_small: whether samples with too few tokens run dense, with a warning, or raise an error.
        told: warnings already given.
        method: name of the settings, for messages; empty: the user gave them all.
        default: the :class:`tokenmerge.default_method.DefaultMethod` that chooses the settings of each
            generation; None: ``config`` has them.
        parts: its blocks, layers and stages that merge or are skipped.
        memories: what is cached for each living generation.
        given_grid: the model's finest token grid in the next calls, where the user gave it.
        record: where each block leaves its latest plan, by its path, while somebody asks for it.
        last_run: what happened in the generation that began last.
        kept: what others looked at when a generation last began; before the first, when it was patched.
        settings: what holds for each level that merges, at the first step.
        over_steps: the settings that follow the steps, for messages.
        caches_results: whether what blocks add is cached at some step, to skip them or to plan by it.
        merges: whether anything merges or is skipped at some step; with a ratio of 0 no token grid is needed.
    """

    config: ToMeConfig
    call: ModelCall
    phases: tuple[tuple[int, MergeSettings], ...]
    groups: tuple[Hashable, ...]
    pipeline: Pipeline
    dense_if_too_small: bool = False
    told: set[str] = dataclasses.field(default_factory=set)
    method: str = ""
    default: Any = None
    parts: tuple[BlockState | LayerState | StageState, ...] = ()
    memories: MutableMapping[Generation, Memory] = dataclasses.field(default_factory=WeakDictionary)
    given_grid: Grid | None = None
    record: dict[str, RecordedPlan] | None = None
    last_run: RunLog | None = None
    recorder: StepRecorder | None = None
    kept: Kept = dataclasses.field(default_factory=Kept)

    def __post_init__(self) -> None:
        self.settings: Mapping[int, MergeSettings] = dict(reversed(self.phases))  # the first phase
        self.follows_steps = self.config.follows_steps
        self.over_steps = named(self.method, " and ".join(self.config.over_steps))
        self.caches_results = self.config.reuse.on or self.config.cached_features is not None
        self.merges = self.config.reuse.on or any(own.merges for _, own in self.phases)
        context = CallContext(self.settings)
        self.threads = PerThread(functools.partial(ThreadState, context, self.groups))

    def warn_once(self, message: str) -> None:
        """Warn, unless the message is empty or was given before."""
        if message and message not in self.told:
            self.told.add(message)
            warn_caller(message)

    def set_size(self, height: int, width: int) -> None:
        """Give the size of the latents, for calls whose token grid cannot be read."""
        patch = self.call.patch
        for name, side in (("height", height), ("width", width)):
            if isinstance(side, bool) or not isinstance(side, int) or side < 1 or side % patch:
                raise ConfigError(
                    f"{name}: expected a height and width of the latents, integers ≥ 1 and multiples of "
                    f"{patch}, got {shown(side)}"
                )
            integer()(name, side)  # refuses numbers that are too large to count with
        grid = Grid(given=True)
        grid.shapes = ((1, height // patch, width // patch),)
        self.given_grid = grid

    @property
    def context(self) -> CallContext:
        """What holds for the running call."""
        return self.threads.value.context

    @property
    def blocks(self) -> tuple[BlockState, ...]:
        """The blocks that merge."""
        return tuple(part for part in self.parts if isinstance(part, BlockState))

    @functools.cached_property
    def skips_blocks(self) -> bool:
        """Whether some step skips blocks by themselves, and not whole stages."""
        return any(block.caches_residuals for block in self.blocks)

    def use(self, memory: Memory) -> None:
        """Cache in ``memory`` from now on, in this thread."""
        for part, cache in zip(self.parts, memory.caches, strict=True):
            part.threads.value.cache = cache
        self.threads.value.memory = memory

    def keep_dense(self, memory: Memory) -> None:
        """Leave the blocks and layers dense in a generation that ``kept`` names."""
        for part, cache in zip(self.parts, memory.caches, strict=True):
            cache.dense = part.path in self.kept.dense

    def begin_call(self) -> None:
        """Prepare for a call of the model, in which blocks count theirs from 0."""
        self.threads.value.running_blocks = None  # of a call that was interrupted
        self.threads.value.spans.clear()
        for part in self.parts:
            if isinstance(part, BlockState):
                part.threads.value.number = -1

    def forget(self) -> None:
        """Drop all that is cached, as the model is restored; a handle may still hold this object."""
        for memory in (*self.memories.values(), self.threads.value.own_memory):
            memory.sample.forget()
            memory.forget()
        self.memories.clear()
        if self.recorder is not None:
            self.recorder.forget_results()
        self.begin_call()


@dataclasses.dataclass(frozen=True, eq=False)
class BlockState:
    """A transformer block that merges; what is not explained is as in :class:`tokenmerge.models.base.Block`.

    Attributes:
        grid: the token grid in each thread, noted by the module around it; None: that of the model.
        caches_residuals: whether it is skipped on some steps by itself, and not with its whole stage.
        plans_first: whether it is the first of the blocks that share plans.
        is_first: whether it is the first block of its level; ``is_last``: the last one.
        is_read_between: whether more than the next block reads its result, as in a ControlNet.
        calls: what its calls merged, by its input, for gradient checkpointing, which runs them again.
    """

    model: ModelState
    path: str
    level: int
    grid: PerThread[Grid] | None
    layout: Layout
    block_layout: Layout | None
    batched: bool
    caches_residuals: bool = False
    plans_first: bool = True
    is_first: bool = False
    is_last: bool = False
    is_read_between: bool = False
    threads: PerThread[PartState] = dataclasses.field(default_factory=lambda: PerThread(PartState))
    calls: MutableMapping[Tensor, BlockMerge] = dataclasses.field(default_factory=WeakDictionary)

    @property
    def settings(self) -> MergeSettings:
        """What holds at the running step."""
        running = self.threads.value.running
        return self.model.threads.value.context.settings[self.level] if running is None else running.settings

    @property
    def grids(self) -> tuple[tuple[int, int, int], ...]:
        """(frames, rows, columns) of its tokens in the running call, of each picture in the sequence."""
        grid = self.model.threads.value.grid if self.grid is None else self.grid.value
        return grid.shapes

    @property
    def image_place(self) -> int:
        """Index of the image tokens in its result, where that is a tuple."""
        return (self.block_layout or self.layout).outputs[0]

    @property
    def call(self) -> Call:
        """The running call."""
        return self.model.threads.value.context.call, self.threads.value.number


@dataclasses.dataclass(frozen=True, eq=False)
class LayerState:
    """A sub-layer whose calls change, with its cache in each thread."""

    block: BlockState
    path: str
    layer: Layer
    threads: PerThread[PartState] = dataclasses.field(default_factory=lambda: PerThread(PartState))


@dataclasses.dataclass(frozen=True, eq=False)
class StageState:
    """A stage of a UNet, or a module of one, that is skipped on some steps.

    ``is_finest`` says whether it is at the finest level, and ``is_last`` whether the modules that do run read
    its result. Without blocks it has no ``grid``.
    """

    model: ModelState
    path: str
    is_finest: bool
    is_last: bool
    grid: PerThread[Grid] | None = None
    threads: PerThread[PartState] = dataclasses.field(default_factory=lambda: PerThread(PartState))


@torch.compiler.assume_constant_result  # called while a graph is traced, and no part of it
def warn_caller(message: str) -> None:
    """Warn at the line that called this package, through PyTorch and diffusers."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in _NOT_THE_CALLER:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
