"""Patches the layers of a model, and runs what merges in them. No other file changes layers of Paddle.

The class of a block or of its sub-layer is swapped for a subclass of the same name. Its ``forward`` looks up
and calls that of the original class at each call. Parameters keep their names; hooks, adapters and attention
processors stay where they are. Models keep their classes and get a hook.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import paddle
from paddle import Tensor, nn

from tokenmerge.config import MergeSettings, ToMeConfig
from tokenmerge.errors import NothingToMergeError, UnsupportedModelError
from tokenmerge.integrations import portable
from tokenmerge.integrations.paddle.models import PaddleBlock, PaddleModel, parameters_of

Forward = functools.partial[Any]  # the method of the original class, bound to the layer
STATE = "_tokenmerge"  # key of the state of a patched layer in its ``__dict__``
# The attention processors of this module add the given mask to their logits.
_MASKED = "ppdiffusers.models.attention_processor"


class _Now(threading.local):
    """State of the running call of the model, for each thread."""

    step = 0
    parts = 1  # number of images of the batch that share a plan
    size: tuple[int, int] | None = None  # height and width of the sample, or None before the first call
    # Path and plan of the block that is running, or None if it is dense or no block runs.
    merge: tuple[str, portable.MergePlan] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Now, ()  # a copy of the model begins anew


class Run:
    """State that the layers of a patched model share. A copy of the model gets its own."""

    def __init__(self, config: ToMeConfig, host: PaddleModel) -> None:
        self.config = config
        self.host = host
        self.now = _Now()
        self.blocks = blocks_to_merge(host, config)
        self.settings: Mapping[int, MergeSettings] = {b.level: config.at_level(b.level) for b in self.blocks}


class State(NamedTuple):
    """State of a patched layer. That of the model itself is its :class:`Run`."""

    run: Run
    block: PaddleBlock  # that it is or belongs to
    name: str = ""  # of a sub-layer in its block


def merged_layers(block: PaddleBlock, settings: MergeSettings) -> tuple[str, ...]:
    """Return the names of the sub-layers of a block whose calls change."""
    if settings.scope == "keys":
        return ("attn1",) if block.own_keys else ()
    return tuple(name for name in block.sub_layers if name in settings.merged_layers)


def blocks_to_merge(host: PaddleModel, config: ToMeConfig) -> tuple[PaddleBlock, ...]:
    """Return the blocks in which something merges."""
    deepest = deepest_level(host, config)
    merging = (block for block in host.blocks if merged_layers(block, config.at_level(block.level)))
    return tuple(block for block in merging if block.level <= deepest)


def deepest_level(host: PaddleModel, config: ToMeConfig) -> int:
    """Return the deepest level that merges: ``max_downsample``, or the finest level with attention."""
    return max(config.max_downsample, min((block.level for block in host.blocks), default=1))


def patch(run: Run) -> None:
    """Patch a model that :func:`check_swappable` accepts and that is not patched."""
    for block in run.blocks:
        _swap(block.layer, block_call, State(run, block))
        for name in merged_layers(block, run.settings[block.level]):
            _swap(getattr(block.layer, name), layer_call, State(run, block, name))
    run.host.root.__dict__[STATE] = run
    run.host.root.register_forward_pre_hook(note_call, with_kwargs=True)


def restore(root: nn.Layer) -> None:
    """Restore every layer of a model. A model that is not patched stays as it is."""
    for layer in root.sublayers(include_self=True):
        if layer.__dict__.pop(STATE, None) is not None:
            layer.__class__ = getattr(type(layer), "_tokenmerge_base", type(layer))
            # Find the hook by its function, because the handle of a hook does not work on a copied layer.
            for key, hook in list(layer._forward_pre_hooks.items()):
                if hook is note_call:
                    del layer._forward_pre_hooks[key]
                    layer._forward_pre_hooks_with_kwargs_flag.pop(key, None)


def check_swappable(host: PaddleModel) -> None:
    """Refuse a model on which ppdiffusers' ``apply_tome`` is on, or with a ``forward`` on a layer itself."""
    for block in host.blocks:
        if hasattr(type(block.layer), "_parent"):
            raise UnsupportedModelError(
                f"{block.path}: ppdiffusers' own apply_tome is on; call ppdiffusers' remove_tome() first, "
                "before tokenmerge.paddle.pipeline_methods is imported, which replaces it"
            )
        layers = {f".{name}": getattr(block.layer, name) for name in block.sub_layers}
        for name, layer in {"": block.layer, **layers}.items():
            if "forward" in layer.__dict__:
                raise UnsupportedModelError(
                    f"{block.path}{name}: other software has replaced its method 'forward' on "
                    "the layer itself, so that merging would have no effect; remove that first, apply token "
                    "merging, then put it back"
                )


@functools.cache
def _swapped_class(base: Any, call: Callable) -> Any:
    """Return the only subclass of ``base`` whose ``forward`` runs ``call`` around that of ``base``."""

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        original = functools.partial(base.forward, self)
        # Other code may keep a reference to this method, and call it after the layer was restored.
        return call(self, original, args, kwargs) if STATE in self.__dict__ else original(*args, **kwargs)

    return type(
        base.__name__,
        (base,),
        {
            "forward": forward,
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "__reduce_ex__": lambda self, protocol: (_rebuild, (base, call), self.__getstate__()),
            "_tokenmerge_base": base,
        },
    )


def _rebuild(base: type, call: Callable) -> nn.Layer:
    """Make an empty layer of a swapped class, for pickle and deepcopy: the class has no import path."""
    cls = _swapped_class(base, call)
    return cls.__new__(cls)


def _swap(layer: nn.Layer, call: Callable, state: State) -> None:
    layer.__dict__[STATE] = state
    base: Any = type(layer)
    layer.__class__ = _swapped_class(base, call)


def note_call(root: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Note the step of a model before it runs, and which images differ only in their prompts."""
    run: Run = root.__dict__[STATE]
    forward = type(root).forward
    arguments = _arguments(forward, args, kwargs)
    sample = arguments[parameters_of(forward)[0]]
    timestep = arguments.get("timestep")
    height, width = sample.shape[1:3] if _has_channels_last(root) else sample.shape[-2:]
    run.now.size = int(height), int(width)
    _check_size(run, *run.now.size)
    if isinstance(timestep, Tensor):
        timestep = float(timestep.cast("float32").max())
    run.now.step = 0 if timestep is None else portable.step_number(timestep)
    run.now.parts = _parts(root, sample) if run.config.merge_sharing.guidance else 1


def block_call(block: Any, forward: Forward, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a transformer block, whose sub-layers merge by a plan made from its input."""
    run, here, _ = block.__dict__[STATE]
    now = run.now
    settings = run.settings[here.level]
    x = _arguments(forward.func, args, kwargs)["hidden_states"]
    b, n = x.shape[:2]
    grid = here.grid(*now.size) if now.size else None
    if grid is None or grid[0] * grid[1] != n:
        raise UnsupportedModelError(
            f"{here.path}: expected the tokens of the grid {grid}, got an input of shape {tuple(x.shape)}; "
            "call the model and not a part of it, or restore it with remove_token_merging(model)"
        )
    parts = now.parts if b % now.parts == 0 else 1
    with paddle.no_grad():
        plan = portable.plan_tokens(paddle, x, grid, settings, now.step, parts)
    now.merge = None if plan is None else (here.path, plan)
    try:
        return forward(*args, **kwargs)
    finally:
        now.merge = None


def layer_call(layer: Any, forward: Forward, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run attention or the feed-forward layer on merged tokens, and return a result for all tokens."""
    run, block, name = layer.__dict__[STATE]
    path, plan = run.now.merge or ("", None)
    arguments = _arguments(forward.func, args, kwargs)
    x = arguments["hidden_states"]
    own_keys = name == "attn1" and block.own_keys
    # Chunks do not fit the plan, and a mask for all keys does not fit merged keys.
    masked = own_keys and arguments.get("attention_mask") is not None
    if plan is None or path != block.path or x.shape[:2] != plan.inverse.shape or masked:
        return forward(*args, **kwargs)
    settings = run.settings[block.level]
    combine = portable.merge if settings.combine == "mean" else portable.keep_destinations
    merged = combine(paddle, plan, x)
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
    return portable.unmerge(paddle, plan, forward(**{**arguments, "hidden_states": merged}))


def _arguments(method: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    return {**dict(zip(parameters_of(method), args, strict=False)), **kwargs}


def _has_channels_last(root: Any) -> bool:
    return getattr(root, "data_format", None) == "NHWC"


def _parts(root: Any, sample: Tensor) -> int:
    """Count how many times the batch holds the same images, once for each prompt of guidance."""
    # The channels that are denoised may be followed by those of a given image.
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
    """Refuse a sample that is so small that no block would merge a token."""
    asked = [block for block in run.blocks if run.settings[block.level].ratio]
    removed = [portable.num_removed(one.grid(height, width), run.settings[one.level]) for one in asked]
    if asked and not any(removed):
        level = asked[0].level
        rows, columns = asked[0].grid(height, width)
        settings = run.settings[level]
        fewest = f" and min_tokens={settings.min_tokens}" if settings.min_tokens else ""
        raise NothingToMergeError(
            f"nothing to merge: the sample gives {rows} × {columns} tokens at level {level}, of which "
            f"ratio={settings.ratio:g} with cells of sy={settings.sy} × sx={settings.sx}{fewest} removes "
            "none; generate a larger image, lower sx and sy, or raise ratio"
        )
