"""Step reuse in UNets: steps that run only the finest level, or only its last layer.

A step that skips the deep stages calls ComfyUI's own forward on a view of the UNet, in which the skipped
blocks do nothing; no module changes. What the skipped blocks would have returned is extrapolated from the
complete steps before it (DeepCache, arXiv 2312.00858; TaylorSeer, arXiv 2503.06923).
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
from tokenmerge.runtime.steps.decide import Decision

# ComfyUI's patches that get what a block of the UNet returned.
_AFTER_BLOCKS = ("input_block_patch", "input_block_patch_after_skip", "output_block_patch")


def call(
    executor: Any,
    cuts: Sequence[Cut],
    residuals: Residuals,
    arguments: Sequence[Any],
    named: Mapping[str, Any],
) -> Any:
    """Call the UNet in ComfyUI's wrapper ``diffusion_model``, without the stages that the step skips.

    ``arguments`` are (x, timesteps, context, y, control, transformer_options).
    """
    *first, control, options = arguments
    cut = _cut(cuts, residuals)
    patches = dict(options.get("patches", {}))
    if cut is not None:
        for name in _AFTER_BLOCKS:
            patches[name] = [_where_blocks_run(patch, cut) for patch in patches.get(name, ())]
        control = _control(control, cut)
    patches["output_block_patch"] = [_AtCuts(cuts, cut, residuals), *patches.get("output_block_patch", ())]
    options = {**options, "patches": patches}
    if cut is None:
        return executor(*first, control, options, **named)
    view = _View(executor.class_obj, cut)
    forward = types.MethodType(executor.original.__func__, view)
    inner = executor.new_class_executor(forward, view, executor.wrappers, executor.idx + 1)
    return inner.execute(*first, control, options, **named)


def _cut(cuts: Sequence[Cut], residuals: Residuals) -> Cut | None:
    """Where the UNet is cut in the running call; None: all of it runs."""
    skipped = [cut for cut in cuts if _distance(cut, residuals.decision) is not None and residuals.of(cut)]
    return max(skipped, key=lambda cut: cut.output, default=None)


def _distance(cut: Cut, decision: Decision) -> Tensor | None:
    return decision.finest if cut.finest else decision.deep


@dataclasses.dataclass(frozen=True, eq=False)
class _AtCuts:
    """An ``output_block_patch`` that caches the input of the blocks after a cut, or extrapolates it."""

    cuts: Sequence[Cut]
    cut: Cut | None
    residuals: Residuals

    def __call__(self, h: Tensor, skip: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        number = options["block"][1]
        for cut in self.cuts:
            if number != cut.output or (self.cut is not None and number < self.cut.output):
                continue
            before = self.residuals.of(cut)
            if cut is self.cut:
                assert before is not None
                h = extrapolated(before, [0.0], _distance(cut, self.residuals.decision))  # type: ignore[arg-type]
                options["transformer_index"] = cut.transformers  # GLIGEN counts transformers
            else:
                self.residuals.keep(cut, updated(before, residual_of(h, [0.0])))
        return h, skip


class _View:
    """A view of a UNet for its forward. Skipped blocks return no channels."""

    middle_block = None  # ComfyUI's forward skips it if it is None

    def __init__(self, unet: Any, cut: Cut) -> None:
        self._unet = unet
        nothing = (_no_channels,)
        self.input_blocks = [
            block if i < cut.inputs else nothing for i, block in enumerate(unet.input_blocks)
        ]
        self.output_blocks = [
            block if i >= cut.output else nothing for i, block in enumerate(unet.output_blocks)
        ]

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
