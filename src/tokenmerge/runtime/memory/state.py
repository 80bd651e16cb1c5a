"""The state of a patched model, its blocks, layers and stages: facts, caches, and what threads hold."""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections.abc import Collection, Hashable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tokenmerge import warn
from tokenmerge.config import COMPARES_NOTHING, MergeSettings, ToMeConfig
from tokenmerge.config.checks import integer, refuse
from tokenmerge.config.origin import RATIO, is_default, named
from tokenmerge.models.base import Grid, Layer, Layout, ModelCall
from tokenmerge.models.placement import Shard
from tokenmerge.ops.plan import Plan
from tokenmerge.plans.method import Method
from tokenmerge.plans.tolerance import Tolerance
from tokenmerge.runtime.memory.caches import BlockMerge, Cache, CallNumbers
from tokenmerge.runtime.memory.run_log import RunLog, StepLog, StepRecorder
from tokenmerge.runtime.memory.uses import Uses
from tokenmerge.runtime.steps.pipeline import Latest, PerThread, Pipeline, WeakDictionary
from tokenmerge.runtime.steps.scheduler import Generation
from tokenmerge.runtime.steps.step_tracker import Decision, SampleTracker, StepTracker

# The one attribute that a patched module has beside its own: one of the classes of this file, or the grids of
# a module around blocks.
STATE = "_tokenmerge"
Phases = Sequence[tuple[int, MergeSettings]]  # a level, and what holds there in a phase


@dataclasses.dataclass(frozen=True)
class RecordedPlan:
    """A plan and the token grids (frames, rows, columns) that it is for.

    A sequence may also hold reference images, behind the image being made, whose grid is ``grid``.
    """

    plan: Plan
    grid: tuple[int, int, int]
    references: tuple[tuple[int, int, int], ...] = ()


class LeftAlone(NamedTuple):
    """What other people's code that looks into a model changes in a generation."""

    config: ToMeConfig = ToMeConfig()
    dense: frozenset[str] = frozenset()  # paths of blocks and layers that do not merge
    note: str = ""  # says so in a line; it is empty where nothing changes


@dataclasses.dataclass(frozen=True, eq=False)
class CallContext:
    """What holds for one call of a patched model; built once, by the hook before the model.

    Blocks that are called without their model have that of its last call in their thread.
    """

    settings: Mapping[int, MergeSettings]  # of the running step, by level
    seed: Tensor = dataclasses.field(default_factory=lambda: torch.zeros((), dtype=torch.int64))  # of draws
    samples: int = 1  # in its batch
    call: int = 0  # its number, that of the call of the step before that it continues
    beside: bool = False  # it belongs to no step: it is dense, and nothing of it is kept
    plan_call: int = 0  # that of the call whose plans this one uses
    caches_plans: bool = False
    shares_plans: bool = False  # blocks with the same grid have one plan, so stacks of them can merge once
    caches_features: frozenset[tuple[int, str]] = frozenset()  # level and kind, for plans of a later step
    blocks_are_dense: bool = False  # nothing merges, is skipped or is cached in blocks
    has_stacks: bool = False  # blocks merge once for a stack of them, or what a stack adds is cached
    decision: Decision = dataclasses.field(default_factory=Decision)
    guidance_copies: int = 1  # how many times the batch holds each sample, for as many prompts
    guidance_scale: float | None = None  # by which guidance combines the copies, where it is known
    # In a graph and on accelerators, whether it does hold equal samples. Elsewhere it does, and this is None.
    copies_equal: Tensor | None = None
    guidance_difference: Tensor | None = None  # what it changed in the last step's result
    # The noise levels of the steps, where a full step makes good what forecasts missed before it.
    sigmas: Tensor | None = None
    step_log: StepLog | None = None  # where blocks note what they merge, if somebody asked for it


class Memory:
    """All that one model caches between calls.

    It belongs to one generation, and ends with it or with the thread that runs it. Where settings do not
    follow the steps, it belongs to one thread. The ``groups`` say for each part of the model (block, layer or
    stage) with which parts it shares its plans.
    """

    def __init__(self, groups: Sequence[Hashable]) -> None:
        self.tracker = StepTracker()
        self.sample = SampleTracker()
        self.seed: Tensor | None = None  # the number that draws of the running step depend on
        self.config: ToMeConfig | None = None  # at its guidance scale; None before its first call
        self.tolerance: Tolerance | None = None  # what changes the settings while the generation runs
        # The scheduler's, where settings do not follow the steps; others begin a generation. As a weak
        # reference to a tensor: nothing but the scheduler holds it, so that a generation ends with it.
        self.timesteps: Any = None
        self.log: RunLog | None = None
        # What guidance changed in the results of the last step, by the call that planned.
        self.guidance_differences: dict[int, Tensor] = {}
        # What all blocks of a level added to the image, by the call of the first block and its level.
        self.model_residuals: dict[tuple[int, int, int], Tensor] = {}
        # Paths of blocks whose tokens something else than the next block reads: a stack ends there.
        self.read_between: set[str] = set()
        plans: dict[Hashable, dict[CallNumbers, Plan]] = {group: {} for group in groups}
        self.caches = tuple(Cache(plans[group]) for group in groups)
        self._generation: weakref.ref[Generation] | None = None
        self._thread: weakref.ref[ThreadState] | None = None

    def belong_to(self, generation: Generation, thread: ThreadState, memories: Memories) -> None:
        """Note the generation, and the thread that runs it; with either of them, all that is cached ends.

        An idle thread still holds this object, so it is emptied.
        """
        if self._thread is not None and self._thread() is thread:
            return
        this_memory = weakref.ref(self)
        all_memories = weakref.ref(memories)
        living = weakref.ref(generation, lambda _: _close(this_memory()))
        self._generation = living
        self._thread = weakref.ref(thread, lambda _: _close(this_memory(), all_memories(), living()))

    def close(self) -> None:
        """Drop all that is cached, for good."""
        self.sample.forget()
        self.forget()
        self.tracker.begin_again()
        if self.log is not None:
            self.log.drop_tensors()

    def forget(self, calls: Collection[int] | None = None) -> None:
        """Drop all that is cached of the calls with some numbers, or of all calls."""
        self.tracker.forget(range(sys.maxsize) if calls is None else calls)
        if self.log is not None:
            _drop(calls, self.log.outputs)
        _drop(calls, self.guidance_differences)
        self.forget_plans(calls)
        self.forget_results(calls)

    def forget_results(self, calls: Collection[int] | None) -> None:
        """Drop the cached results of the calls with some numbers, or of all calls."""
        _drop(calls, self.model_residuals)
        for cache in self.caches:
            _drop(calls, cache.residuals, cache.skippable)

    def forget_plans(self, calls: Collection[int] | None) -> None:
        """Drop the plans of the calls with some numbers, or of all calls."""
        _drop(calls, *(cache.plans for cache in self.caches))


Memories = WeakDictionary  # the Memory of each living generation


def _close(memory: Memory | None, memories: Memories | None = None, generation: Any = None) -> None:
    """Close a memory whose generation or thread is gone, and take it out of those of its model."""
    if memory is not None:
        memory.close()
    if memories is not None and generation is not None and memories.get(generation) is memory:
        del memories[generation]


def _drop(calls: Collection[int] | None, *dictionaries: dict[Any, Any]) -> None:
    """Drop the entries of some calls; keys are their numbers, or begin with them."""
    for cached in dictionaries:
        for key in tuple(cached):
            if calls is None or (key if isinstance(key, int) else key[0]) in calls:
                del cached[key]


class RunningStack(Protocol):
    """A stack of blocks that runs in a call, as :mod:`tokenmerge.runtime.blocks.stack` makes it."""

    blocks: int  # that have run


class ThreadState:
    """What belongs to a thread that calls a patched model, as its running call or the last one left it."""

    def __init__(self, context: CallContext, groups: Sequence[Hashable]) -> None:
        # Before the first call, what blocks find that are called without their model. They run dense, unless
        # this thread has patched the model: others may be in the middle of a call.
        self.context = context
        self.grid = Grid()  # the model's finest token grid
        self.shard: Shard | None = (
            None  # the part of the sequence that this process has, or None if it has all
        )
        self.own_memory = Memory(groups)  # what is cached where settings do not follow the steps
        self.memory = Memory(())  # what the call caches
        # By call and level, the tokens that the first block of the level was called with.
        self.spans: dict[tuple[int, int, int], Tensor] = {}
        # By call of a span, see ``blocks.span``: what its first module was called with.
        self.inputs: dict[CallNumbers, Any] = {}
        self.numbers: dict[tuple[int, torch.device], Tensor] = {}  # see ``steps.step_tracker.step_seed``
        self.stack: RunningStack | None = None  # of blocks, if one runs
        self.ran: set[str] = set()  # parts of the model that the running call has run, "deep" and "finest"
        self.fills = 0  # calls since the last generation began that filled a cache for the next one


@dataclasses.dataclass(eq=False)
class PartState:
    """What a block, a layer or a stage needs in the running call of a thread."""

    cache: Cache = dataclasses.field(default_factory=Cache)
    number: int = -1  # of a block, index of this call among its calls in one model forward
    # Of a block, what its running call merges; None between calls. It is known before the block runs where
    # gradient checkpointing repeats a recorded call, and where a block that is compiled alone gets its plan
    # from outside its graph. Otherwise the block itself finds out.
    running: BlockMerge | None = None
    # A block that is compiled alone runs its graph: its call is numbered, and is in its stack, outside of it.
    runs_graph: bool = False


@dataclasses.dataclass(eq=False)
class ModelState:
    """A patched model."""

    config: ToMeConfig  # of the default method, what any of its generations may do
    call: ModelCall
    phases: Phases  # for each phase and level that merges, where it merges most
    groups: tuple[Hashable, ...]  # for each of ``parts``, the group of parts that share its plans
    pipeline: Pipeline
    dense_if_too_small: bool = False  # samples with too few tokens run dense, with a warning
    told: set[str] = dataclasses.field(default_factory=set)  # warnings already given
    method: str = ""  # name of the settings, for messages, unless the user gave them all
    # What chooses the settings of each generation, or None where all have those of ``config``.
    default: Method | None = None
    # Those that merge or are skipped.
    parts: tuple[BlockState | LayerState | StageState | SpanState, ...] = ()
    blocks: Sequence[BlockState] = ()  # the blocks among them
    denoises: bool = True  # its result is for the scheduler, as that of a ControlNet is not
    skips_blocks: bool = False  # some step skips blocks by themselves, and not whole stages
    skippable: frozenset[str] = frozenset()  # the parts that some step skips, of "deep" and "finest"
    shares_positions: bool = False  # some token argument has no batch axis
    memories: Memories = dataclasses.field(default_factory=WeakDictionary)
    given_grid: Grid | None = None  # the model's finest token grid in the next calls, where the user gave it
    record: dict[str, RecordedPlan] | None = None  # where each block leaves its latest plan, by its path
    recorder: StepRecorder | None = None
    cached_bytes: int = 0  # of a model without described blocks, what its last run cached between steps
    uses: Uses = dataclasses.field(default_factory=Uses)  # the threads that run it
    derived: int = 0  # ``swap.Derived.number`` when its blocks were last seen to have no other patch
    runs: Latest[RunLog | None] = dataclasses.field(default_factory=lambda: Latest(None))
    # Since a generation last began, or since patching.
    all_left_alone: Latest[LeftAlone] = dataclasses.field(default_factory=lambda: Latest(LeftAlone()))

    def __post_init__(self) -> None:
        reuse = self.config.reuse
        self.settings: Mapping[int, MergeSettings] = dict(reversed(self.phases))  # of the first phase
        self.follows_steps = self.config.follows_steps
        # Whether merged tokens may count once where attention cannot count them more often.
        self.may_count_once = self.default is not None or is_default(self.method) or self.method == RATIO
        self.over_steps = named(self.method, " and ".join(self.config.over_steps))  # for messages
        # Whether what blocks add is cached at some step, to skip them or to plan by it.
        self.caches_results = reuse.on or self.config.cached_features is not None
        # Whether any plan depends on the step: what it draws, or what it compares.
        fixed = [phase.seed is None and phase.planner in COMPARES_NOTHING for _, phase in self.phases]
        self.numbers_steps = self.follows_steps or not all(fixed)
        # Whether anything merges or is skipped at some step; with a ratio of 0 no token grid is needed,
        # nor for a model whose blocks are not described.
        reads_grid = reuse.on and self.call.described
        self.merges = reads_grid or any(phase.merges for _, phase in self.phases)
        before = CallContext(self.settings, blocks_are_dense=True)
        self._new_thread = functools.partial(ThreadState, before, self.groups)
        self.threads = PerThread(self._new_thread)

    @property
    def last_run(self) -> RunLog | None:
        """The run of this thread, or the latest one of any thread if this one has run none."""
        return self.runs.value

    @property
    def left_alone(self) -> LeftAlone:
        """What other people's code changes in that run."""
        return self.all_left_alone.value

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
                refuse(
                    name, f"a height and width of the latents, integers ≥ 1 and multiples of {patch}", side
                )
            integer()(name, side)  # refuses numbers that are too large to count with
        grid = Grid(given=True)
        grid.shapes = ((1, height // patch, width // patch),)
        self.given_grid = grid  # last, since other threads read it

    @property
    def context(self) -> CallContext:
        """What holds for the running call."""
        return self.threads.value.context

    def use(self, memory: Memory) -> None:
        """Cache in ``memory`` from now on, in this thread."""
        for part, cache in zip(self.parts, memory.caches, strict=True):
            part.threads.value.cache = cache
        self.threads.value.memory = memory

    def leave_alone(self, left_alone: LeftAlone, memory: Memory) -> None:
        """Leave dense what other people's code looks at, and no more, from now on."""
        self.all_left_alone.set(left_alone)
        for part, cache in zip(self.parts, memory.caches, strict=True):
            cache.dense = part.path in left_alone.dense

    def begin_call(self) -> None:
        """Prepare for a call of the model, in which blocks count theirs from 0."""
        thread = self.threads.value
        thread.stack = None  # of a call that was interrupted
        thread.spans.clear()
        thread.inputs.clear()
        thread.ran.clear()
        for part in self.parts:
            part.threads.value.number = -1

    def forget(self) -> None:
        """Drop all that is cached in any thread, as the model is restored; a handle may still hold this."""
        for memory in (*self.memories.values(), self.threads.value.own_memory):
            memory.close()
        self.memories.clear()
        self.threads = PerThread(self._new_thread)  # the values of all threads go with the former object
        for part in self.parts:
            object.__setattr__(part, "threads", PerThread(PartState))


@dataclasses.dataclass(frozen=True, eq=False)
class BlockState:
    """A transformer block that merges or is skipped.

    Other fields are as in :class:`tokenmerge.models.base.Block`.
    """

    model: ModelState
    path: str
    level: int
    grid: PerThread[Grid] | None  # noted by the module around it, or None if it is that of the model
    layout: Layout
    block_layout: Layout | None
    beside: str
    merges: bool  # something of it merges at some step
    caches_residuals: bool  # it is skipped on some steps by itself, and not with its whole stage
    plans_first: bool  # it is the first of the blocks that share plans
    is_first: bool  # of its level
    is_last: bool  # of its level
    is_read_between: bool  # more than the next block reads its result, as in a ControlNet
    threads: PerThread[PartState] = dataclasses.field(default_factory=lambda: PerThread(PartState))
    # What its calls merged, by its input, for gradient checkpointing, which runs them again.
    calls: MutableMapping[Tensor, BlockMerge] = dataclasses.field(default_factory=WeakDictionary)

    @property
    def settings(self) -> MergeSettings:
        """What holds at the running step."""
        running = self.threads.value.running
        return self.model.threads.value.context.settings[self.level] if running is None else running.settings

    @property
    def grids(self) -> tuple[tuple[int, int, int], ...]:
        """(frames, rows, columns) of its tokens in the running call, of each image in the sequence."""
        return (self.model.threads.value.grid if self.grid is None else self.grid.value).shapes

    @property
    def image_place(self) -> int:
        """Index of the image tokens in its result, where that is a tuple."""
        return (self.block_layout or self.layout).outputs[0]

    @property
    def call(self) -> CallNumbers:
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
    """A stage of a UNet, or a module of one, that is skipped on some steps."""

    model: ModelState
    path: str
    is_finest: bool  # it is at the finest level
    is_last: bool  # the modules that do run read its result
    grid: PerThread[Grid] | None  # None if it has no blocks
    threads: PerThread[PartState] = dataclasses.field(default_factory=lambda: PerThread(PartState))


@dataclasses.dataclass(frozen=True, eq=False)
class SpanState:
    """A module that is skipped together with others, in a model without described blocks, or that model."""

    model: ModelState
    path: str  # empty: the model itself
    is_first: bool  # it runs first of them, and is not the model itself
    is_last: bool  # the modules that do run read its result
    threads: PerThread[PartState] = dataclasses.field(default_factory=lambda: PerThread(PartState))


# It is called while a graph is traced, and is no part of it.
warn_caller = torch.compiler.assume_constant_result(warn.warn_caller)
