"""What the methods of a patched model do: merge, call the host's own method, unmerge."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tokenmerge.config import ToMeConfig
from tokenmerge.errors import NothingToMergeError, UnsupportedModelError
from tokenmerge.methods.tome import num_removed, plan_tome
from tokenmerge.ops import Plan, merge, unmerge

__all__ = [
    "STATE",
    "BlockState",
    "Grid",
    "RecordedPlan",
    "Run",
    "block_call",
    "check_grid",
    "layer_call",
    "note_grid",
    "note_step",
    "parameters",
]

# The one attribute that a patched module has beside its own: a Run, a Grid or a BlockState.
STATE = "_tokenmerge"


@dataclasses.dataclass(frozen=True)
class RecordedPlan:
    """A plan and the token grid ``height`` × ``width`` that it is for."""

    plan: Plan
    height: int
    width: int


@dataclasses.dataclass(eq=False)
class Run:
    """What all blocks of a patched model share.

    Attributes:
        config: the settings.
        sample: name of the model's argument ``[b, c, h, w]``.
        timestep: name of the argument that says how far denoising has come.
        parameters: names of all its arguments, in order.
        levels: resolution levels of the blocks that merge.
        step: an integer that follows the timestep of the running call; blocks that are called without
            their model have that of its last call, or 0.
        record: where each block leaves its latest plan, by its path, while somebody asks for it.
    """

    config: ToMeConfig
    sample: str
    timestep: str
    parameters: list[str]
    levels: tuple[int, ...]
    step: Tensor = dataclasses.field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    record: dict[str, RecordedPlan] | None = None


@dataclasses.dataclass(eq=False)
class Grid:
    """The token grid of the running call, left by the module whose input shows it."""

    height: int = 0
    width: int = 0


@dataclasses.dataclass(eq=False)
class BlockState:
    """What a block leaves for its sub-layers while it runs: the plan, or None where nothing merges."""

    run: Run
    grid: Grid
    path: str
    plan: Plan | None = None


# Two hooks note what a call is about; they run before the module's ``forward``, whoever replaced that.


def note_step(root: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Before the model: refuse a sample that is too small, note the denoising step."""
    run: Run = root.__dict__[STATE]
    sample = _argument(run.sample, run.parameters, args, kwargs)
    check_grid(run, *sample.shape[-2:])
    run.step = _step_of(_argument(run.timestep, run.parameters, args, kwargs), sample.device)


def note_grid(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Before the module around some blocks: note their token grid, that of its first argument."""
    grid: Grid = module.__dict__[STATE]
    x = args[0] if args else kwargs["hidden_states"]
    grid.height, grid.width = x.shape[-2:]


# Two functions make the method of a swapped class from the method of the original one, taken as a plain
# function, which torch.compile can follow. A module that is called through a reference to this method after
# it was restored has no state and does what it did before.


def block_call(original: Callable) -> Callable:
    """The transformer block: plans from its input, for its sub-layers."""
    names = parameters(original)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: BlockState | None = self.__dict__.get(STATE)
        if state is None:
            return original(self, *args, **kwargs)
        state.plan = _plan(state, _argument(names[0], names, args, kwargs))
        try:
            return original(self, *args, **kwargs)
        finally:
            state.plan = None

    return forward


def layer_call(original: Callable) -> Callable:
    """Attention or feed-forward: runs on merged tokens."""
    names = parameters(original)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: BlockState | None = self.__dict__.get(STATE)
        plan = None if state is None else state.plan
        x = _argument(names[0], names, args, kwargs)
        # Parts of the sequence, as in feed-forward chunking, and masks of an IP-Adapter, which are laid out
        # for the full grid, do not fit the plan.
        if plan is None or not plan.fits(x) or kwargs.get("ip_adapter_masks") is not None:
            return original(self, *args, **kwargs)
        mask = kwargs.get("attention_mask")
        if mask is not None and kwargs.get("encoder_hidden_states") is None:
            kwargs = {**kwargs, "attention_mask": _mask_of_kept(mask, plan)}
        merged = merge(plan, x)
        if args:
            return unmerge(plan, original(self, merged, *args[1:], **kwargs))
        return unmerge(plan, original(self, **{**kwargs, names[0]: merged}))

    return forward


def parameters(function: Callable) -> list[str]:
    """Names of a method's parameters after ``self``."""
    return list(inspect.signature(function).parameters)[1:]


def _argument(name: str, names: list[str], args: tuple, kwargs: dict[str, Any]) -> Any:
    """The argument called ``name`` of a call, however it was passed."""
    return kwargs[name] if name in kwargs else args[names.index(name)]


def _plan(state: BlockState, x: Tensor) -> Plan | None:
    run, height, width = state.run, state.grid.height, state.grid.width
    if x.shape[1] != height * width:
        raise UnsupportedModelError(
            f"{state.path}: expected the {height} × {width} = {height * width} tokens of its grid, got an "
            f"input of shape {tuple(x.shape)}; this model calls its blocks in a way that tokenmerge does not "
            "know: remove_token_merging(model) restores it"
        )
    plan = plan_tome(x, height, width, run.config, run.step)
    if run.record is not None and plan is not None:
        run.record[state.path] = RecordedPlan(plan, height, width)
    return plan


def check_grid(run: Run, height: int, width: int) -> None:
    """See that a sample of this size has tokens to merge.

    Raises:
        NothingToMergeError: it has not.
    """
    config = run.config
    grids = {level: (-(-height // level), -(-width // level)) for level in run.levels}
    if config.ratio and not any(num_removed(*grid, config) for grid in grids.values()):
        level = min(run.levels)
        raise NothingToMergeError(
            f"nothing to merge: a sample of {height} × {width} gives {grids[level][0]} × {grids[level][1]} "
            f"tokens at level {level}, of which ratio={config.ratio:g} with cells of sy={config.sy} × "
            f"sx={config.sx} removes none; generate a larger image, lower sx and sy, or raise ratio"
        )


def _step_of(timestep: Tensor | float, device: torch.device) -> Tensor:
    """An integer that differs between denoising steps: the bits of the timestep.

    The timestep rather than a counter: it is the same for the conditional and the unconditional half of
    classifier-free guidance, for every batch size, and in the second forward pass of gradient checkpointing.
    Training may give each sample of a batch its own timestep; the first one's counts for all.
    """
    first = torch.as_tensor(timestep, device=device, dtype=torch.float32).reshape(-1)[0]
    return first.view(torch.int32).to(torch.int64)


def _mask_of_kept(mask: Tensor, plan: Plan) -> Tensor:
    """A mask ``[b, …, n]`` over keys for the merged tokens, ``[b, …, m]``: each has its own place's value."""
    kept = plan.kept()
    kept = kept.view(kept.shape[0], *[1] * (mask.ndim - 2), kept.shape[1])
    return mask.gather(-1, kept.expand(*mask.shape[:-1], -1))
