"""Replacements of the blocks of transformers: merge, call the block, unmerge what it changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tokenmerge.integrations.comfyui.sampling import Running, Step, prompts_in, step_in
from tokenmerge.models.call import HostCall
from tokenmerge.models.layout import Layout
from tokenmerge.ops import num_tokens
from tokenmerge.runtime.forward import COMBINE
from tokenmerge.runtime.merged_call import merged_call


@dataclasses.dataclass(frozen=True, eq=False)
class ReplacedBlock:
    """What ComfyUI calls instead of a block.

    Attributes:
        key: ComfyUI's name and number of the block.
        layout: of its call.
        inner: what another node replaced the block by; None: nothing.
    """

    key: tuple[Any, ...]
    layout: Layout
    inner: Callable[..., Any] | None = None

    def __call__(self, arguments: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        """The result of the block, with its tokens merged meanwhile."""
        options = arguments.get("transformer_options")
        step = step_in(options)

        def block(given: dict[str, Any]) -> dict[str, Any]:
            return extra["original_block"](given) if self.inner is None else self.inner(given, extra)

        def run(**given: Any) -> tuple[Tensor, Tensor | None]:
            # Blocks of ComfyUI add to their input in place, and what they added is wanted here.
            result = block({**given, "img": given["img"].clone()})
            return result["img"], result.get("txt")

        call = HostCall(run, (), (), arguments)
        running = None if step is None or options is None else self._running(step, call, options)
        if step is None or running is None:
            return block(arguments)
        step.running = running
        running.weighs = running.settings.proportional
        try:
            image, text = merged_call(
                call, self.layout, running.plan, COMBINE[running.settings.combine], change_only=True
            )
        finally:
            step.running = None
        return {"img": image, "txt": text}  # None where a block has no text, as the last one of SD 3

    def _running(self, step: Step, call: HostCall, options: dict[str, Any]) -> Running | None:
        """What the block merges; None: it is dense."""
        tokens, target = self.layout.tokens_of(call), step.settings.target
        grid = target.grid(step.latent)
        n = num_tokens(grid)
        if self.key[0] == "double_block" and tokens.shape[1] != n:
            step.has_references = True  # blocks of one stream, which run later, cannot tell them from text
        if step.has_references or call.has(self.layout.dense_if) or _differs_by_frame(call.argument("vec")):
            return None
        place = "transformer" if step.settings.config.plans.blocks else self.key
        plan = step.plan(place, self.layout.image(tokens, n), grid, 1, prompts_in(options))
        return None if plan is None else Running(plan, step.at(1), self.layout.text == "first")


def _differs_by_frame(modulation: Any) -> bool:
    """Whether frames have modulations of their own, as in Wan 2.2: ``[b, f, 6, c]``."""
    return isinstance(modulation, Tensor) and modulation.ndim > 3 and modulation.shape[1] > 1
