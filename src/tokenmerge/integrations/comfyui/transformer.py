"""Replacements of the blocks of transformers: merge, call the block, unmerge what it added."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tokenmerge.integrations.comfyui.sampling import Running, Step, prompts_in, step_in
from tokenmerge.models.base import Layout
from tokenmerge.models.call import HostCall
from tokenmerge.ops.partition import num_tokens
from tokenmerge.plans.generation import Merging
from tokenmerge.runtime.blocks.merged_call import add_lost, added_to_image, merged_call


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

        call, sampling, n = HostCall(run, (), (), arguments), step.sampling, num_tokens(step.grid)
        tokens = self.layout.tokens_of(call)
        if self.key[0] == "double_block" and tokens.shape[1] != n:
            step.has_references = True  # single-stream blocks, which run later, cannot tell them from text
        dense = (
            step.has_references or call.has(self.layout.dense_if) or _differs_by_frame(call.argument("vec"))
        )
        if dense or not step.merges(step.grid, 1):
            return block(arguments)
        lost, measures = sampling.of(self.key), sampling.decision.merging is Merging.MEASURES
        if measures:
            image, text = call.result()
        else:
            place = "transformer" if step.settings.config.plans.blocks else self.key
            prompts = prompts_in(arguments["transformer_options"])
            plan = step.plan(place, self.layout.image(tokens, n), step.grid, 1, prompts)
            settings, text_first = step.at(1), self.layout.text == "first"
            step.running = Running(plan, settings, text_first, weighs=settings.proportional)
            try:
                image, text = merged_call(call, self.layout, plan, settings.combine, change_only=True)
            finally:
                step.running = None
            if lost is not None:
                image = add_lost(self.layout, plan, image, lost, settings.combine)
        if measures or lost is not None:
            sampling.keep(self.key, added_to_image(self.layout, image, tokens, n))
        return {"img": image, "txt": text}  # None if a block returns no text, like the last one of SD 3


def _differs_by_frame(modulation: Any) -> bool:
    """Return whether frames have modulations of their own, as in Wan 2.2: ``[b, f, 6, c]``."""
    return isinstance(modulation, Tensor) and modulation.ndim > 3 and modulation.shape[1] > 1
