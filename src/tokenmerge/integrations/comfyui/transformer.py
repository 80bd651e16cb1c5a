"""Replacements of the blocks of transformers: merge, call the block, unmerge what it added."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tokenmerge.integrations.comfyui.sampling import Grid, Running, Sampling, Step, prompts_in, step_in
from tokenmerge.models.base import Layout
from tokenmerge.models.call import HostCall
from tokenmerge.ops import num_tokens
from tokenmerge.plans.generation import Merging
from tokenmerge.runtime.blocks.merged_call import COMBINE, add_lost, merged_call, of_image
from tokenmerge.runtime.memory.reuse import Residual


@dataclasses.dataclass(frozen=True, eq=False)
class ReplacedBlock:
    """What ComfyUI calls instead of a block."""

    key: tuple[Any, ...]  # ComfyUI's name and number of the block
    layout: Layout  # layout of its call
    inner: Callable[..., Any] | None = None  # the replacement by another node; None: there is none

    def __call__(self, arguments: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        """Return the result of the block, which runs on merged tokens."""
        step = step_in(arguments.get("transformer_options"))

        def block(given: dict[str, Any]) -> dict[str, Any]:
            return extra["original_block"](given) if self.inner is None else self.inner(given, extra)

        if step is None:
            return block(arguments)
        sampling = step.sampling
        if not sampling.decision.caches:
            return self._full(step, arguments, block)
        key, distance = sampling.in_call(self.key), sampling.decision.deep
        return sampling.runs.call(key, distance, arguments, lambda given: self._full(step, given, block))

    def _full(
        self, step: Step, arguments: dict[str, Any], block: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the result of the block if it is not skipped."""

        def run(**given: Any) -> tuple[Tensor, Tensor | None]:
            # ComfyUI's blocks add to their input in place. The copy keeps the input for the difference.
            result = block({**given, "img": given["img"].clone()})
            return result["img"], result.get("txt")

        call, grid = HostCall(run, (), (), arguments), step.grid
        if not self._can_merge(step, call, grid) or not step.merges(grid, 1):
            return block(arguments)
        tokens, n, sampling = self.layout.tokens_of(call), num_tokens(grid), step.sampling
        if sampling.decision.merging is Merging.MEASURES:
            image, text = call.result()
            self._keep(sampling, image - tokens, n)
            return {"img": image, "txt": text}
        place = "transformer" if step.settings.config.plans.blocks else self.key
        prompts = prompts_in(arguments["transformer_options"])
        plan = step.plan(place, self.layout.image(tokens, n), grid, 1, prompts)
        settings, lost = step.at(1), sampling.of(self.key)
        combine = COMBINE[settings.combine]
        step.running = Running(plan, settings, self.layout.text == "first", weighs=settings.proportional)
        try:
            image, text = merged_call(call, self.layout, plan, combine, change_only=True)
        finally:
            step.running = None
        if lost is not None:
            image = add_lost(self.layout, plan, image, lost.latest, combine)
            self._keep(sampling, image - tokens, n)
        return {"img": image, "txt": text}  # None if a block returns no text, like the last one of SD 3

    def _can_merge(self, step: Step, call: HostCall, grid: Grid) -> bool:
        """Return whether the tokens of this call can merge."""
        tokens = self.layout.tokens_of(call)
        if self.key[0] == "double_block" and tokens.shape[1] != num_tokens(grid):
            step.has_references = True  # single-stream blocks, which run later, cannot tell them from text
        return not (
            step.has_references or call.has(self.layout.dense_if) or _differs_by_frame(call.argument("vec"))
        )

    def _keep(self, sampling: Sampling, added: Tensor, n: int) -> None:
        sampling.keep(self.key, of_image(self.layout, Residual(True, (added,)), n))


def _differs_by_frame(modulation: Any) -> bool:
    """Return whether frames have modulations of their own, as in Wan 2.2: ``[b, f, 6, c]``."""
    return isinstance(modulation, Tensor) and modulation.ndim > 3 and modulation.shape[1] > 1
