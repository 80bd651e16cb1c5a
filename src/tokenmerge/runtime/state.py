"""What a patched model and its blocks know, beside what they are: settings, grids, plans."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tokenmerge.config import ToMeConfig
from tokenmerge.models.layout import Grid, Layout
from tokenmerge.ops import Plan
from tokenmerge.runtime.caches import Call, Changes, Guided, Plans, Seen, SeenWith, Shapes, Stack
from tokenmerge.runtime.guidance import SameSample
from tokenmerge.runtime.pipeline import Pipeline
from tokenmerge.runtime.step_tracker import StepNumbers, Turns

__all__ = ["STATE", "BlockState", "LayerState", "RecordedPlan", "Run", "StageState"]

# The one attribute that a patched module has beside its own: a Run, a Grid, a StageState, a BlockState or a
# LayerState.
STATE = "_tokenmerge"


@dataclasses.dataclass(frozen=True)
class RecordedPlan:
    """A plan and the token grid (frames, rows, columns) that it is for."""

    plan: Plan
    grid: tuple[int, int, int]


@dataclasses.dataclass(eq=False)
class Run:
    """What all blocks of a patched model share.

    Attributes:
        config: the settings.
        sample: name of the model's argument for the sample.
        timestep: name of the argument that says how far denoising has come, or (model, arguments by name) →
            a number that does.
        parameters: names of all its arguments, in order.
        read_grid: (model, arguments by name, grid of the last call or ``given_grid``) → (frames, rows,
            columns) of its finest token grid.
        levels: resolution levels of the blocks that merge.
        latents: (model, sample) → the part of it that is the same for all prompts of guidance.
        between: names of arguments that change tokens between the blocks of a stack, or leave blocks out.
        patch: side of the square of latent positions that makes one token.
        given_grid: the finest token grid of the next calls, where the user gave it; None: nobody did.
        grid: the finest token grid of the running call.
        steps: makes the numbers of steps.
        step: an integer that follows the timestep of the running call; blocks that are called without
            their model have that of its last call, or 0.
        pipeline: that the model is part of.
        parts: how many times the running batch holds each sample, for as many prompts.
        shared: in a graph and on accelerators, whether it does hold the same ones; None: it does.
        same: whether the running call is on the same sample as the last one.
        turns: which step and which call of it is running, where the settings follow the steps.
        stages: for each level what holds in each phase, where it merges most.
        settings: what holds at the running step, by level.
        corrects: whether the running call is dense and keeps what merging would lose.
        keeps: whether blocks keep what they change, for steps in which they do not run.
        ahead: of such a step, how far it is from those that ran, as :meth:`Turns.ahead` says; None: they run.
        finest_ahead: the same for the finest level of a UNet.
        holds: whether its plans are used again.
        plan_turn: number of the call of a step that planned for the running one.
        guided: what guidance changed in the results of the last step.
        blocks: that merge.
        layers: of these, those whose calls change.
        below: the stages of a UNet below its finest level, if they do not run on every step.
        finest: what is at that level before the last layer on the way up, if it does not.
        record: where each block leaves its latest plan, by its path, while somebody asks for it.
    """

    config: ToMeConfig
    sample: str
    timestep: str | Callable[[Any, Mapping[str, Any]], Tensor]
    parameters: list[str]
    read_grid: Callable[[Any, Mapping[str, Any], Grid], tuple[int, int, int]]
    levels: tuple[int, ...]
    latents: Callable[[Any, Any], Any]
    between: tuple[str, ...] = ()
    patch: int = 1
    given_grid: Grid | None = None
    grid: Grid = dataclasses.field(default_factory=Grid)
    steps: StepNumbers = dataclasses.field(default_factory=StepNumbers)
    step: Tensor = dataclasses.field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    pipeline: Pipeline = dataclasses.field(default_factory=Pipeline)
    parts: int = 1
    shared: Tensor | None = None
    same: SameSample = dataclasses.field(default_factory=SameSample)
    turns: Turns = dataclasses.field(default_factory=Turns)
    stages: tuple[tuple[int, ToMeConfig], ...] = ()
    settings: dict[int, ToMeConfig] = dataclasses.field(default_factory=dict)
    corrects: bool = False
    keeps: bool = False
    ahead: Tensor | None = None
    finest_ahead: Tensor | None = None
    holds: bool = False
    plan_turn: int = 0
    guided: Guided = dataclasses.field(default_factory=Guided)
    blocks: list[BlockState] = dataclasses.field(default_factory=list)
    layers: list[LayerState] = dataclasses.field(default_factory=list)
    below: list[StageState] = dataclasses.field(default_factory=list)
    finest: list[StageState] = dataclasses.field(default_factory=list)
    record: dict[str, RecordedPlan] | None = None

    def __post_init__(self) -> None:
        self.stages = tuple((level, s) for level in self.levels for s in self.config.stages(level))
        self.settings = {level: next(self.config.stages(level)) for level in self.levels}

    def forget(self, first: int = 0, last: int = sys.maxsize) -> None:
        """Let go of all that calls with these numbers in their steps have left."""
        noted: tuple[dict[int, Any], ...] = (
            self.turns.planned,
            self.turns.corrected,
            self.turns.compared,
            self.guided,
        )
        for by_number in noted:
            for number in [number for number in by_number if first <= number <= last]:
                del by_number[number]
        for kept in self._kept():
            for call in [call for call in kept if first <= call[0] <= last]:
                del kept[call]
        self._leave_stacks()

    def forget_results(self, number: int) -> None:
        """Let go of the results that a call with this number in its step has left, but of no plan."""
        for kept in self._results():
            for call in [call for call in kept if call[0] == number]:
                del kept[call]

    def _kept(self) -> Iterator[dict[Any, Any]]:
        """What is kept by tuples that begin with the number of a call."""
        yield self.turns.ran
        yield from (block.plans for block in self.blocks)
        yield from self._results()

    def _results(self) -> Iterator[dict[Any, Any]]:
        yield from (block.changes for block in self.blocks)
        yield from (layer.changes for layer in self.layers)
        for stage in (*self.below, *self.finest):
            yield from (stage.changes, stage.shapes)

    def _leave_stacks(self) -> None:
        """Let go of what a call that was broken off within a stack has left there."""
        for block in self.blocks:
            if block.stack is not None:
                block.stack.inside = None

    def begin_call(self, plan_anew: bool) -> None:
        """Before a call of the model: blocks count theirs from 0, and have no plans that it makes anew."""
        self._leave_stacks()
        for block in self.blocks:
            block.number = -1
            for call in [call for call in block.plans if plan_anew and call[0] == self.plan_turn]:
                del block.plans[call]

    def sample_gone(self) -> None:
        """After all calls on one sample: let go of what the next step will not use."""
        if not self.config.follows_steps:
            self.forget()
        elif self.turns.is_last:
            self.forget(self.plan_turn, self.turns.number)
            for run in self.pipeline.runs:
                if not run.turns.is_last:  # a model for the first steps alone
                    run.forget()


@dataclasses.dataclass(eq=False)
class BlockState:
    """What a block leaves for its sub-layers while it runs: the plan, or None where nothing merges now.

    Attributes:
        run: of its model.
        level: of its resolution.
        grid: of its tokens.
        path: its name in the model.
        layout: how it takes its tokens.
        batched: whether each image of a batch has a plan of its own.
        wide: how the block as a whole takes its tokens; None: it cannot run on merged ones.
        stack: that it is in; None: it is in none.
        is_first: whether it is the one of its stack that merges.
        is_last: whether it is the one that unmerges.
        plans: for other calls and other blocks.
        size: images and tokens that a plan for the running call has; None where nothing merges.
        plan: of the running call; None on dense steps for corrections too.
        number: of that among the block's in one call of the model, from 0.
        changes: what it adds to its tokens.
        seen: with gradients, what it ran with.
        settled: what the running call runs with, where that is known before the block runs: gradient
            checkpointing runs it again on the same tokens, and a block that is compiled alone gets a plan
            that other calls use too from outside its graph. None: the block itself finds out.
    """

    run: Run
    level: int
    grid: Grid
    path: str
    layout: Layout
    batched: bool
    wide: Layout | None = None
    stack: Stack | None = None
    is_first: bool = False
    is_last: bool = False
    plans: Plans = dataclasses.field(default_factory=Plans)
    size: tuple[int, int] | None = None
    plan: Plan | None = None
    number: int = -1
    changes: Changes = dataclasses.field(default_factory=Changes)
    seen: SeenWith = dataclasses.field(default_factory=SeenWith)
    settled: Seen | None = None

    @property
    def settings(self) -> ToMeConfig:
        """What holds at the running step."""
        return self.run.settings[self.level] if self.settled is None else self.settled.settings

    @property
    def keeps(self) -> bool:
        """Whether it keeps what it changes for steps in which it, and not its whole stage, does not run."""
        alone = self.wide is not None and self.settings.scope != "stack"
        return self.run.keeps and alone and not self.run.below

    @property
    def call(self) -> Call:
        """The running call."""
        return self.run.turns.number, self.number

    @property
    def planning_call(self) -> Call:
        """The one whose plan the running call uses."""
        return self.run.plan_turn, self.number


@dataclasses.dataclass(eq=False)
class LayerState:
    """What a sub-layer knows.

    Attributes:
        block: that it belongs to.
        kind: ``"attn1"``, ``"attn2"`` or ``"ff"``.
        layout: how it takes its tokens.
        own_keys: of attention, whether it looks at the tokens that it is called with.
        keys: name of the argument by which it can be given merged keys; None: there is none.
        changes: its latest results, corrected.
    """

    block: BlockState
    kind: str
    layout: Layout
    own_keys: bool = True
    keys: str | None = None
    changes: Changes = dataclasses.field(default_factory=Changes)


@dataclasses.dataclass(eq=False)
class StageState:
    """What a part of a UNet knows that does not run on every step: a stage, or a module of one.

    Attributes:
        run: of its model.
        finest: whether it is at the finest level.
        is_last: whether its result is what those take that do run.
        grid: of its tokens, if it has blocks.
        changes: of the last one, its results when it last ran.
        shapes: of the others, what their results look like.
    """

    run: Run
    finest: bool
    is_last: bool
    grid: Grid | None = None
    changes: Changes = dataclasses.field(default_factory=Changes)
    shapes: Shapes = dataclasses.field(default_factory=Shapes)

    @property
    def ahead(self) -> Tensor | None:
        """How far the running call is from those in which it ran, as :meth:`Turns.ahead` says."""
        return self.run.finest_ahead if self.finest else self.run.ahead
