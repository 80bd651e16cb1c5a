"""Step reuse in UNets: steps that run only the finest level, and steps that skip that too.

A step that skips stages calls ComfyUI's own forward on a view of the UNet, in which the skipped blocks do
nothing; no module changes. What they would have returned is extrapolated from the steps that ran them
(DeepCache, arXiv 2312.00858; TaylorSeer, arXiv 2503.06923).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from tokenmerge.integrations.comfyui.models import Cut
from tokenmerge.integrations.comfyui.sampling import Sampling
from tokenmerge.runtime.memory.reuse import extrapolated, updated

# ComfyUI's patches that get what a block of the UNet returned.
_AFTER_BLOCKS = ("input_block_patch", "input_block_patch_after_skip", "output_block_patch")
# The parts whose results are cached.
_DEEP, _FINEST = "deep", "finest"


def call(
    executor: Any, cut: Cut, sampling: Sampling, arguments: Sequence[Any], named: Mapping[str, Any]
) -> Any:
    """Call the UNet in ComfyUI's wrapper ``diffusion_model``, without the stages that the step skips.

    ``arguments`` are (x, timesteps, context, y, control, transformer_options).
    """
    *first, control, options = arguments
    distances: dict[str, Any] = {_FINEST: sampling.decision.finest, _DEEP: sampling.decision.deep}
    # The highest part that the running call skips; None: all of the UNet runs.
    skipped = next((part for part in distances if distances[part] is not None and sampling.of(part)), None)

    def result(part: str, h: Tensor) -> Tensor:
        """Return the result of a part: extrapolated where it is skipped; otherwise ``h``, which is cached."""
        if part == skipped:
            (h,) = extrapolated(sampling.of(part), [0.0], distances[part])
        else:
            sampling.keep(part, updated(sampling.of(part), (h.clone(),)))
        return h

    def below_finest(h: Tensor, skip: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Cache the result of the deep stages, or extrapolate it; an ``output_block_patch``."""
        if options["block"][1] == cut.output:
            h = result(_DEEP, h)
            if skipped == _DEEP:
                options["transformer_index"] = cut.transformers  # GLIGEN counts transformers
        return h, skip

    patches = dict(options.get("patches", {}))
    if skipped == _DEEP:
        for name in _AFTER_BLOCKS:
            patches[name] = [_where_blocks_run(patch, cut) for patch in patches.get(name, ())]
        control = _control(control, cut)
    elif skipped == _FINEST:
        control = None
    patches["output_block_patch"] = [below_finest, *patches.get("output_block_patch", ())]
    view = _View(executor.class_obj, cut, skipped)
    if sampling.settings.config.reuse.skips_finest:
        out = view.out
        view.out = lambda h: out(result(_FINEST, h))
    forward = types.MethodType(executor.original.__func__, view)
    inner = executor.new_class_executor(forward, view, executor.wrappers, executor.idx + 1)
    return inner.execute(*first, control, {**options, "patches": patches}, **named)


class _View:
    """A view of a UNet for its forward, without the blocks that a call skips."""

    def __init__(self, unet: Any, cut: Cut, skipped: str | None) -> None:
        self._unet, self.out = unet, unet.out
        if skipped is not None:
            self.middle_block = None  # ComfyUI's forward skips it if it is None
        if skipped == _DEEP:
            nothing = (_no_channels,)
            self.input_blocks = [
                block if i < cut.inputs else nothing for i, block in enumerate(unet.input_blocks)
            ]
            self.output_blocks = [
                block if i >= cut.output else nothing for i, block in enumerate(unet.output_blocks)
            ]
        elif skipped == _FINEST:
            self.input_blocks = self.output_blocks = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._unet, name)


def _no_channels(x: Tensor) -> Tensor:
    return x[:, :0]


def _where_blocks_run(patch: Callable[..., Any], cut: Cut) -> Callable[..., Any]:
    """Return a patch that does nothing after skipped blocks."""

    def patched(*values: Any) -> Any:
        *tensors, options = values
        if cut.runs(*options["block"]):
            return patch(*values)
        return tuple(tensors) if len(tensors) > 1 else tensors[0]

    return patched


def _control(control: dict[str, Any] | None, cut: Cut) -> dict[str, Any] | None:
    """Return what a ControlNet adds to the blocks that run; the first block's value is the last one."""
    if control is None:
        return None
    kept = dict(control)
    for way in ("input", "middle", "output"):
        values = control.get(way, [])
        last = len(values) - 1
        kept[way] = [value if cut.runs(way, last - i) else None for i, value in enumerate(values)]
    return kept
