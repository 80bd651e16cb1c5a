"""Step reuse in UNets: steps that run only the finest level, and steps that skip that too.

A step that skips stages calls ComfyUI's own forward on a view of the UNet, in which the skipped blocks do
nothing; no module changes. What they would have returned is extrapolated from the steps that ran them
(DeepCache, arXiv 2312.00858; TaylorSeer, arXiv 2503.06923).
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from tokenmerge.integrations.comfyui.models import Cut
from tokenmerge.integrations.comfyui.reuse import Residuals
from tokenmerge.runtime.memory.reuse import extrapolated, residual_of, updated

# ComfyUI's patches that get what a block of the UNet returned.
_AFTER_BLOCKS = ("input_block_patch", "input_block_patch_after_skip", "output_block_patch")
# The parts whose results are cached.
_DEEP, _FINEST = "deep", "finest"


def call(
    executor: Any,
    cut: Cut,
    skips_finest: bool,
    residuals: Residuals,
    arguments: Sequence[Any],
    named: Mapping[str, Any],
) -> Any:
    """Call the UNet in ComfyUI's wrapper ``diffusion_model``, without the stages that the step skips.

    ``skips_finest`` says whether any step skips the finest level. ``arguments`` are (x, timesteps, context,
    y, control, transformer_options).
    """
    *first, control, options = arguments
    part = _skipped(residuals)
    patches = dict(options.get("patches", {}))
    if part == _DEEP:
        for name in _AFTER_BLOCKS:
            patches[name] = [_where_blocks_run(patch, cut) for patch in patches.get(name, ())]
        control = _control(control, cut)
    elif part == _FINEST:
        control = None
    patches["output_block_patch"] = [
        _BelowFinest(cut, part, residuals),
        *patches.get("output_block_patch", ()),
    ]
    options = {**options, "patches": patches}
    view = _View(executor.class_obj, cut, part)
    if skips_finest:
        view.out = _WithFinest(view.out, part, residuals)
    forward = types.MethodType(executor.original.__func__, view)
    inner = executor.new_class_executor(forward, view, executor.wrappers, executor.idx + 1)
    return inner.execute(*first, control, options, **named)


def _skipped(residuals: Residuals) -> str | None:
    """Return the highest part that the running call skips; None: all of the UNet runs."""
    decision = residuals.decision
    if decision.finest is not None and residuals.of(_FINEST) is not None:
        return _FINEST
    return _DEEP if decision.deep is not None and residuals.of(_DEEP) is not None else None


def _result(part: str, skips: bool, residuals: Residuals, h: Tensor) -> Tensor:
    """Return the result of a part: extrapolated where it is skipped; otherwise ``h``, which is cached."""
    before, decision = residuals.of(part), residuals.decision
    if not skips:
        residuals.keep(part, updated(before, residual_of(h, [0.0])))
        return h
    distance = decision.finest if part == _FINEST else decision.deep
    assert before is not None
    assert distance is not None
    found: Tensor = extrapolated(before, [0.0], distance)
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class _BelowFinest:
    """An ``output_block_patch`` that caches the result of the deep stages, or extrapolates it."""

    cut: Cut
    part: str | None
    residuals: Residuals

    def __call__(self, h: Tensor, skip: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        if options["block"][1] == self.cut.output:
            skips = self.part == _DEEP
            h = _result(_DEEP, skips, self.residuals, h)
            if skips:
                options["transformer_index"] = self.cut.transformers  # GLIGEN counts transformers
        return h, skip


@dataclasses.dataclass(frozen=True, eq=False)
class _WithFinest:
    """The layers after the finest level, whose result is cached before them, or extrapolated."""

    out: Callable[[Tensor], Any]
    part: str | None
    residuals: Residuals

    def __call__(self, h: Tensor) -> Any:
        return self.out(_result(_FINEST, self.part == _FINEST, self.residuals, h))


class _View:
    """A view of a UNet for its forward, without the blocks that a call skips."""

    def __init__(self, unet: Any, cut: Cut, part: str | None) -> None:
        self._unet, self.out = unet, unet.out
        if part is not None:
            self.middle_block = None  # ComfyUI's forward skips it if it is None
        if part == _DEEP:
            nothing = (_no_channels,)
            self.input_blocks = [
                block if i < cut.inputs else nothing for i, block in enumerate(unet.input_blocks)
            ]
            self.output_blocks = [
                block if i >= cut.output else nothing for i, block in enumerate(unet.output_blocks)
            ]
        elif part == _FINEST:
            self.input_blocks = self.output_blocks = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._unet, name)


def _no_channels(x: Tensor) -> Tensor:
    return x[:, :0]


def _where_blocks_run(patch: Callable[..., Any], cut: Cut) -> Callable[..., Any]:
    """Return a patch that does nothing after skipped blocks."""

    def patched(*values: Any) -> Any:
        *tensors, options = values
        way, number = options["block"]
        if number >= cut.output if way == "output" else number < cut.inputs:
            return patch(*values)
        return tuple(tensors) if len(tensors) > 1 else tensors[0]

    return patched


def _control(control: dict[str, Any] | None, cut: Cut) -> dict[str, Any] | None:
    """Return what a ControlNet adds to the blocks that run; the first block's value is the last one."""
    if control is None:
        return None

    def kept(name: str, runs: Callable[[int], bool]) -> list[Any]:
        values = control.get(name, [])
        return [value if runs(len(values) - 1 - i) else None for i, value in enumerate(values)]

    return {
        **control,
        "input": kept("input", lambda number: number < cut.inputs),
        "middle": [],
        "output": kept("output", lambda number: number >= cut.output),
    }
