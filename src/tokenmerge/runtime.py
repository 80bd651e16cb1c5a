"""What the methods of a patched model do: merge, call the host's own method, unmerge."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tokenmerge.config import ToMeConfig
from tokenmerge.errors import NothingToMergeError, UnsupportedModelError
from tokenmerge.layout import Grid, Layout, argument, given, keyed_call, merged_call
from tokenmerge.methods import PLANNERS
from tokenmerge.methods.tome import num_removed
from tokenmerge.ops import (
    Plan,
    keep_destinations,
    merge,
    merge_with_norm,
    num_tokens,
    shared_features,
)
from tokenmerge.proportional import ProportionalAttention

__all__ = [
    "STATE",
    "BlockState",
    "LayerState",
    "Pipeline",
    "RecordedPlan",
    "Run",
    "block_call",
    "check_grid",
    "layer_call",
    "note_call",
    "note_grid",
    "parameters",
]

# The one attribute that a patched module has beside its own: a Run, a Grid, a BlockState or a LayerState.
STATE = "_tokenmerge"

COMBINE = {"mean": merge, "keep": keep_destinations, "norm": merge_with_norm}


@dataclasses.dataclass(frozen=True)
class RecordedPlan:
    """A plan and the token grid (frames, rows, columns) that it is for."""

    plan: Plan
    grid: tuple[int, int, int]


class Pipeline:
    """The pipeline that a model is part of; copies and pickles of the model are part of none."""

    def __init__(self, pipe: object = None) -> None:
        try:
            self._reference = None if pipe is None else weakref.ref(pipe)
        except TypeError:  # a plain namespace with models in it
            self._reference = None

    @property
    def guides(self) -> bool:
        """Whether it is denoising under classifier-free guidance."""
        pipe = None if self._reference is None else self._reference()
        return bool(getattr(pipe, "do_classifier_free_guidance", False))

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipeline:
        return Pipeline()

    def __reduce__(self) -> tuple[Any, ...]:
        return Pipeline, ()


@dataclasses.dataclass(eq=False)
class Run:
    """What all blocks of a patched model share.

    Attributes:
        config: the settings.
        sample: name of the model's argument for the sample.
        timestep: name of the argument that says how far denoising has come, or (model, arguments by name) →
            a number that does.
        parameters: names of all its arguments, in order.
        read_grid: (model, arguments by name, grid of the last call) → (frames, rows, columns) of its finest
            token grid.
        levels: resolution levels of the blocks that merge.
        grid: the finest token grid of the running call.
        step: an integer that follows the timestep of the running call; blocks that are called without
            their model have that of its last call, or 0.
        pipeline: that the model is part of.
        guided: whether the two halves of the running batch are the same samples with two prompts.
        record: where each block leaves its latest plan, by its path, while somebody asks for it.
    """

    config: ToMeConfig
    sample: str
    timestep: str | Callable[[Any, Mapping[str, Any]], Tensor]
    parameters: list[str]
    read_grid: Callable[[Any, Mapping[str, Any], Grid], tuple[int, int, int]]
    levels: tuple[int, ...]
    grid: Grid = dataclasses.field(default_factory=Grid)
    step: Tensor = dataclasses.field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    pipeline: Pipeline = dataclasses.field(default_factory=Pipeline)
    guided: bool = False
    record: dict[str, RecordedPlan] | None = None


@dataclasses.dataclass(eq=False)
class BlockState:
    """What a block leaves for its sub-layers while it runs: the plan, or None where nothing merges.

    Attributes:
        run: of its model.
        grid: of its tokens.
        path: its name in the model.
        layout: how it takes its tokens.
        batched: whether each image of a batch has a plan of its own.
        wide: how the block as a whole takes its tokens, where it runs on merged ones.
        plan: of the running call.
    """

    run: Run
    grid: Grid
    path: str
    layout: Layout
    batched: bool
    wide: Layout | None = None
    plan: Plan | None = None


@dataclasses.dataclass(eq=False)
class LayerState:
    """What a sub-layer knows.

    Attributes:
        block: that it belongs to.
        layout: how it takes its tokens.
        proportional: whether merged tokens count for as many keys as they stand for.
        keys: name of the argument by which it is given merged keys; None: all of its tokens merge.
    """

    block: BlockState
    layout: Layout
    proportional: bool = False
    keys: str | None = None


# Two hooks note what a call is about; they run before the module's ``forward``, whoever replaced that.


def note_call(root: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Before the model: refuse a sample that is too small, note its token grid and the denoising step."""
    run: Run = root.__dict__[STATE]
    arguments = {**dict(zip(run.parameters, args, strict=False)), **kwargs}
    grid = run.read_grid(root, arguments, run.grid)
    check_grid(run, grid)
    run.grid.frames, run.grid.rows, run.grid.columns = grid
    sample = arguments[run.sample]
    device = (sample[0] if isinstance(sample, list) else sample).device
    told = run.timestep
    timestep = arguments[told] if isinstance(told, str) else told(root, arguments)
    run.step = _step_of(timestep, device)
    run.guided = (
        run.config.share_guidance
        and not torch.compiler.is_compiling()
        and run.pipeline.guides
        and _halves_are_equal(sample)
    )


def note_grid(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Before the module around some blocks: note their token grid, that of its first argument."""
    grid: Grid = module.__dict__[STATE]
    x = args[0] if args else kwargs["hidden_states"]
    grid.frames, (grid.rows, grid.columns) = 1, x.shape[-2:]


# Two functions make the method of a swapped class from the method of the original one, taken as a plain
# function, which torch.compile can follow. A module that is called through a reference to this method after
# it was restored has no state and does what it did before.


def block_call(original: Callable) -> Callable:
    """The transformer block: plans from its input, for itself or for its sub-layers."""
    names = parameters(original)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: BlockState | None = self.__dict__.get(STATE)
        if state is None or (state.wide is not None and given(state.wide.whole, names, args, kwargs)):
            return original(self, *args, **kwargs)
        layout = state.layout
        tokens = argument(layout.tokens or names[0], names, args, kwargs)
        mask = argument(layout.padding, names, args, kwargs) if layout.padding else None
        state.plan = _plan(state, tokens, mask)
        try:
            if state.wide is None or state.plan is None:
                return original(self, *args, **kwargs)
            function, combine = functools.partial(original, self), COMBINE[state.run.config.combine]
            return merged_call(
                function, state.wide, state.plan, names, args, kwargs, combine, change_only=True
            )
        finally:
            state.plan = None

    return forward


def layer_call(original: Callable) -> Callable:
    """Attention or feed-forward: runs on merged tokens."""
    names = parameters(original)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: LayerState | None = self.__dict__.get(STATE)
        plan = None if state is None else state.block.plan
        if state is None or plan is None:
            return original(self, *args, **kwargs)
        tokens, wide = argument(names[0], names, args, kwargs), state.block.wide is not None
        # Parts of the sequence, as in feed-forward chunking, do not fit the plan.
        if not _fits(plan, tokens, wide) or given(state.layout.whole, names, args, kwargs):
            return original(self, *args, **kwargs)
        function, combine = functools.partial(original, self), COMBINE[state.block.run.config.combine]
        with _proportional(state, plan):
            if wide:
                return function(*args, **kwargs)
            if state.keys is not None:
                _check_keys(self, state)
                return keyed_call(function, state.layout, plan, state.keys, names, args, kwargs, combine)
            return merged_call(function, state.layout, plan, names, args, kwargs, combine)

    return forward


def _proportional(state: LayerState, plan: Plan) -> AbstractContextManager[Any]:
    return (
        ProportionalAttention(plan, state.layout, state.block.path) if state.proportional else nullcontext()
    )


def _check_keys(attention: nn.Module, state: LayerState) -> None:
    if getattr(attention, "fused_projections", False):
        raise UnsupportedModelError(
            f"{state.block.path}: scope='keys' needs keys and values projected apart from the queries, and "
            "they are fused; call unfuse_qkv_projections(), or take scope='layers'"
        )


def parameters(function: Callable) -> list[str]:
    """Names of a method's parameters after ``self``."""
    return list(inspect.signature(function).parameters)[1:]


def _fits(plan: Plan, x: Tensor, merged: bool) -> bool:
    b, n = plan.keep.shape if merged else plan.inverse.shape
    return x.shape[0] == b and x.shape[1] >= n


def _plan(state: BlockState, x: Tensor, mask: Tensor | None) -> Plan | None:
    """The plan for a block's tokens; ``mask`` tells them from padding behind them."""
    run, grid = state.run, state.grid.shape
    n = num_tokens(grid)
    if x.shape[1] < n:
        raise UnsupportedModelError(
            f"{state.path}: expected the {' × '.join(map(str, grid))} = {n} tokens of its grid, got an "
            f"input of shape {tuple(x.shape)}; this model calls its blocks in a way that tokenmerge does not "
            "know: remove_token_merging(model) restores it"
        )
    start = None if mask is None else mask.sum(dim=1) - n
    plan = _new_plan(state, state.layout.image(x, n, start))
    if run.record is not None and plan is not None:
        run.record[state.path] = RecordedPlan(plan, grid)
    if plan is not None and start is not None:
        plan = plan.within(start, x.shape[1])
    return plan


def _new_plan(state: BlockState, features: Tensor) -> Plan | None:
    run, b = state.run, features.shape[0]
    parts = b if not state.batched else 2 if run.guided and b % 2 == 0 else 1
    if parts > 1:
        features = shared_features(features, parts)
    # The step is where the sample is; blocks of a model on several devices need not be.
    step = run.step.to(features.device)
    plan = PLANNERS[run.config.planner](features, state.grid.shape, run.config, step)
    return plan.repeated(parts) if plan is not None and parts > 1 else plan


def check_grid(run: Run, grid: tuple[int, int, int]) -> None:
    """See that a call with this finest grid of (frames, rows, columns) has tokens to merge.

    Raises:
        NothingToMergeError: it has not.
    """
    config = run.config
    frames, rows, columns = grid
    grids = {level: (frames, -(-rows // level), -(-columns // level)) for level in run.levels}
    if config.ratio and not any(num_removed(grid, config) for grid in grids.values()):
        level = min(run.levels)
        raise NothingToMergeError(
            f"nothing to merge: the sample gives {' × '.join(map(str, grids[level][frames == 1 :]))} tokens "
            f"at level {level}, of which ratio={config.ratio:g} with cells of sy={config.sy} × "
            f"sx={config.sx}{f' × st={config.st}' if config.st > 1 else ''} removes none; generate a larger "
            f"image, lower {'sx, sy and st' if config.st > 1 else 'sx and sy'}, or raise ratio"
        )


def _halves_are_equal(sample: Tensor | list[Tensor]) -> bool:
    """Whether a batch is one half twice, as pipelines call a model under classifier-free guidance."""
    half, odd = divmod(len(sample), 2)
    if odd or sample[0].is_meta:
        return False
    if isinstance(sample, list):
        return all(torch.equal(a, b) for a, b in zip(sample[:half], sample[half:], strict=True))
    return torch.equal(sample[:half], sample[half:])


def _step_of(timestep: Tensor | float, device: torch.device) -> Tensor:
    """An integer that differs between denoising steps: the bits of the timestep.

    The timestep rather than a counter: it is the same for the conditional and the unconditional half of
    classifier-free guidance, for every batch size, and in the second forward pass of gradient checkpointing.
    Training may give each sample of a batch its own timestep, and image-to-video models each token, with 0
    for the picture that is given; the latest counts for all.
    """
    latest = torch.as_tensor(timestep, device=device, dtype=torch.float32).max()
    return latest.view(torch.int32).to(torch.int64)
