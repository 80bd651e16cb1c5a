"""The state of a patched model, its blocks, layers and stages: facts, and what each thread holds."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import NamedTuple, Protocol

import torch

from tokenmerge.config import MergeSettings, ToMeConfig
from tokenmerge.config.checks import integer
from tokenmerge.config.origin import is_default, named
from tokenmerge.errors import ConfigError, shown
from tokenmerge.models.base import Grid, Layer, Layout, ModelCall
from tokenmerge.ops import Plan
from tokenmerge.plans import Facts, Tolerance
from tokenmerge.runtime.memory.caches import Call, EmptyWhenCopied, Memory, RecordedMerges
from tokenmerge.runtime.memory.context import CallContext, PartState, ThreadState
from tokenmerge.runtime.memory.run_log import RunLog
from tokenmerge.runtime.memory.step_log import StepRecorder
from tokenmerge.runtime.steps.pipeline import PerThread, Pipeline
from tokenmerge.runtime.steps.scheduler import Generation

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


class Memories(EmptyWhenCopied, weakref.WeakKeyDictionary[Generation, Memory]):
    """What a model caches for each living generation."""


class ChoosesSettings(Protocol):
    """Chooses the settings of each generation: :class:`tokenmerge.default_method.DefaultMethod`."""

    facts_at: Callable[..., Facts]
    settings: Callable[[Facts], ToMeConfig]
    tolerance: Callable[[Facts], Tolerance | None]
    shortfall: Callable[[Facts], str]


class Kept(NamedTuple):
    """What other people's code that looks into a model changes in a generation.

    Attributes:
        config: the settings of the generation.
        dense: paths of the blocks and layers that do not merge in it.
        note: says so in a line; empty: nothing changes.
    """

    config: ToMeConfig = ToMeConfig()
    dense: frozenset[str] = frozenset()
    note: str = ""


@dataclasses.dataclass(eq=False)
class ModelState:
    """A patched model.

    Attributes:
        config: the settings; of the default method, what any of its generations may do.
        phases: (level, what holds there) for each level that merges and each phase, where it merges most.
        groups: for each part, the group of parts that share its plans.
        dense_if_too_small: whether samples with too few tokens run dense, with a warning, or raise an error.
        told: warnings already given.
        method: name of the settings, for messages; empty: the user gave them all.
        default: the default method, which chooses the settings of each generation; None: ``config`` has them.
        parts: its blocks, layers and stages that merge or are skipped, in the order of ``groups``.
        given_grid: the model's finest token grid in the next calls, where the user gave it.
        record: where each block leaves its latest plan, by its path, while somebody asks for it.
        last_run: what happened in the generation that began last; None before the first.
        kept: what others looked at when a generation last began; before the first, when it was patched.
        settings: what holds for each level that merges, at the first step.
        follows_steps: whether it has to be known which denoising step it is.
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
    default: ChoosesSettings | None = None
    parts: tuple[BlockState | LayerState | StageState, ...] = ()
    memories: Memories = dataclasses.field(default_factory=Memories)
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
        grid.shape = 1, height // patch, width // patch
        self.given_grid = grid

    @property
    def is_default(self) -> bool:
        """Whether the settings are the default method's, which leaves alone what others look at."""
        return is_default(self.method)

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

    @contextlib.contextmanager
    def recording(self) -> Iterator[dict[str, RecordedPlan]]:
        """While the context lasts, each block leaves its latest plan, by its path."""
        before, latest = self.record, dict[str, RecordedPlan]()
        self.record = latest
        try:
            yield latest
        finally:
            self.record = before

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
        calls: what was recorded of its calls for gradient checkpointing, which runs them again.
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
    calls: RecordedMerges = dataclasses.field(default_factory=RecordedMerges)

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

    @property
    def plan_call(self) -> Call:
        """The call whose plan the running one uses."""
        return self.model.threads.value.context.plan_call, self.threads.value.number


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


def warn_caller(message: str) -> None:
    """Warn at the line that called this package, through PyTorch and diffusers."""
    level = 2
    if not torch.compiler.is_compiling():
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in _NOT_THE_CALLER:
            frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
