"""The hooks and methods of a patched model: they note the step and the grid, merge, and unmerge."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import paddle
from paddle import Tensor

from tokenmerge.config import MergeSettings, ToMeConfig
from tokenmerge.errors import NothingToMergeError, UnsupportedModelError
from tokenmerge.integrations.paddle.models import PaddleBlock, PaddleModel, parameters_of
from tokenmerge.integrations.portable import (
    Plan,
    keep_destinations,
    merge,
    num_removed,
    plan_tokens,
    step_number,
    unmerge,
)

Forward = functools.partial[Any]  # the method of the original class, bound to the layer
# Key of the state of a patched layer in its ``__dict__``.
STATE = "_tokenmerge"
# The attention processors of this module add the given mask to their logits.
_MASKED = "ppdiffusers.models.attention_processor"
_COMBINE: dict[str, Callable[..., Tensor]] = {"mean": merge, "keep": keep_destinations}


class _Now(threading.local):
    """State of the running call of the model, for each thread."""

    def __init__(self) -> None:
        self.step = 0
        self.parts = 1  # number of images of the batch that share a plan
        self.size: tuple[int, int] | None = None  # height and width of the sample; None: no call was seen
        # Path and plan of the block that is running; None: it is dense, or no block runs.
        self.merge: tuple[str, Plan] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Now, ()  # a copy of the model begins anew


class Run:
    """State that the layers of a patched model share. A copy of the model gets its own."""

    def __init__(self, config: ToMeConfig, host: PaddleModel) -> None:
        self.config, self.host, self.now = config, host, _Now()
        self.blocks = blocks_to_merge(host, config)
        self.settings: Mapping[int, MergeSettings] = {b.level: config.at_level(b.level) for b in self.blocks}


class State(NamedTuple):
    """State of a patched layer."""

    run: Run  # state that it shares with the other layers
    block: PaddleBlock | None = None  # the block that it is or belongs to; None for a model
    name: str = ""  # name of a sub-layer in its block


def merged_layers(block: PaddleBlock, settings: MergeSettings) -> tuple[str, ...]:
    """Return the names of the sub-layers of a block whose calls change."""
    if settings.scope == "keys":
        return ("attn1",) if block.own_keys else ()
    return tuple(name for name in block.sub_layers if name in settings.merged_layers)


def blocks_to_merge(host: PaddleModel, config: ToMeConfig) -> tuple[PaddleBlock, ...]:
    """Return the blocks in which something merges."""
    within = [block for block in host.blocks if block.level <= deepest_level(host, config)]
    return tuple(block for block in within if merged_layers(block, config.at_level(block.level)))


def deepest_level(host: PaddleModel, config: ToMeConfig) -> int:
    """Return the deepest level that merges: ``max_downsample``, or the finest level with attention."""
    return max(config.max_downsample, min((block.level for block in host.blocks), default=1))


def note_call(root: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Note the step of a model before it runs, and which images differ only in their prompts.

    Raises:
        NothingToMergeError: the sample is so small that no block would merge a token.
    """
    run: Run = root.__dict__[STATE].run
    names = parameters_of(type(root).forward)
    arguments = _arguments(names, args, kwargs)
    sample, timestep = arguments[names[0]], arguments.get("timestep")
    height, width = sample.shape[1:3] if _has_channels_last(root) else sample.shape[-2:]
    run.now.size = int(height), int(width)
    _check_size(run, *run.now.size)
    if isinstance(timestep, Tensor):
        timestep = float(timestep.cast("float32").max())
    run.now.step = 0 if timestep is None else step_number(timestep)
    run.now.parts = _parts(root, sample) if run.config.plans.guidance else 1


def block_call(block: Any, forward: Forward, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a transformer block, whose sub-layers merge by a plan made from its input."""
    run, here, _ = block.__dict__[STATE]
    now, settings = run.now, run.settings[here.level]
    x = _arguments(parameters_of(forward.func), args, kwargs)["hidden_states"]
    b, n = x.shape[:2]
    grid = here.grid(*now.size) if now.size else None
    if grid is None or grid[0] * grid[1] != n:
        raise UnsupportedModelError(
            f"{here.path}: expected the tokens of the grid {grid}, got an input of shape {tuple(x.shape)}; "
            "call the model and not a part of it, or restore it with remove_token_merging(model)"
        )
    with paddle.no_grad():
        plan = plan_tokens(paddle, x, grid, settings, now.step, now.parts if b % now.parts == 0 else 1)
    now.merge = None if plan is None else (here.path, plan)
    try:
        return forward(*args, **kwargs)
    finally:
        now.merge = None


def layer_call(layer: Any, forward: Forward, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run attention or the feed-forward layer on merged tokens, and return a result for all tokens."""
    run, block, name = layer.__dict__[STATE]
    path, plan = run.now.merge or ("", None)
    arguments = _arguments(parameters_of(forward.func), args, kwargs)
    x = arguments["hidden_states"]
    own_keys = name == "attn1" and block.own_keys
    # Chunks do not fit the plan, and a mask for all keys does not fit merged keys.
    masked = own_keys and arguments.get("attention_mask") is not None
    if plan is None or path != block.path or x.shape[:2] != plan.inverse.shape or masked:
        return forward(*args, **kwargs)
    settings = run.settings[block.level]
    merged = _COMBINE[settings.combine](paddle, plan, x)
    if own_keys and settings.proportional:
        processor = type(layer.processor)
        if processor.__module__ != _MASKED:
            raise UnsupportedModelError(
                f"{path}: proportional=True needs an attention processor that takes a mask; expected one "
                f"of ppdiffusers' own, got {processor.__name__}; take one of these, or proportional=False"
            )
        # An additive mask [b, 1, m] weighs each key by the tokens that it stands for (arXiv 2210.09461).
        arguments["attention_mask"] = paddle.log(plan.sizes).cast(x.dtype).unsqueeze(1)
    if settings.scope == "keys":
        return forward(**{**arguments, "encoder_hidden_states": merged})
    return unmerge(paddle, plan, forward(**{**arguments, "hidden_states": merged}))


def _arguments(names: tuple[str, ...], args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _has_channels_last(root: Any) -> bool:
    return getattr(root, "data_format", None) == "NHWC"


def _parts(root: Any, sample: Tensor) -> int:
    """Count how many times the batch holds the same images, once for each prompt of guidance."""
    # The channels that are denoised may be followed by those of a given picture.
    axis = sample.ndim - 1 if _has_channels_last(root) else 1
    channels = getattr(root.config, "out_channels", None) or sample.shape[axis]
    latents = sample.slice([axis], [0], [min(channels, sample.shape[axis])])
    for parts in (2, 3):
        if latents.shape[0] % parts == 0:
            first, *others = latents.chunk(parts, axis=0)
            if all(bool((first == other).all()) for other in others):
                return parts
    return 1


def _check_size(run: Run, height: int, width: int) -> None:
    """Check that some block has tokens to merge in a sample of this size."""
    asked = [(block.level, block.grid(height, width), run.settings[block.level]) for block in run.blocks]
    asked = [own for own in asked if own[2].ratio]
    if asked and not any(num_removed(grid, settings) for _, grid, settings in asked):
        level, (rows, columns), settings = asked[0]
        fewest = f" and min_tokens={settings.min_tokens}" if settings.min_tokens else ""
        raise NothingToMergeError(
            f"nothing to merge: the sample gives {rows} × {columns} tokens at level {level}, of which "
            f"ratio={settings.ratio:g} with cells of sy={settings.sy} × sx={settings.sx}{fewest} removes "
            "none; generate a larger image, lower sx and sy, or raise ratio"
        )
