"""Replacements of the blocks of transformers: merge, call the block, unmerge what it added."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from tokenmerge.integrations.comfyui.models import Key
from tokenmerge.integrations.comfyui.sampling import Sampling, sampling_in
from tokenmerge.models.base import Layout
from tokenmerge.models.call import HostCall
from tokenmerge.ops.partition import num_tokens
from tokenmerge.runtime.blocks.merged_call import add_lost, added_to_image, merged_call
from tokenmerge.runtime.memory.caches import Tensors, each, extrapolated, updated

Call = Callable[[dict[str, Any]], dict[str, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class ReplacedBlock:
    """What ComfyUI calls instead of a block.

    ``layout`` is that of the block's call, and ``inner`` the replacement by another node, if there is one.
    """

    key: Key
    layout: Layout
    inner: Callable[..., Any] | None = None

    def __call__(self, arguments: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        """Return the result of the block, which runs on merged tokens."""

        def block(given: dict[str, Any]) -> dict[str, Any]:
            return extra["original_block"](given) if self.inner is None else self.inner(given, extra)

        sampling = sampling_in(arguments.get("transformer_options"))
        if sampling is None:
            return block(arguments)
        run = functools.partial(self._full, sampling, block)
        caches = sampling.decision.caches
        return block_in_run(sampling, self.key, arguments, run) if caches else run(arguments)

    def _full(self, sampling: Sampling, block: Call, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the result of the block if it is not skipped."""

        def run(**given: Any) -> tuple[Tensor, Tensor | None]:
            # ComfyUI's blocks add to their input in place. The copy keeps the input for the difference.
            result = block({**given, "img": given["img"].clone()})
            return result["img"], result.get("txt")

        call = HostCall(run, (), (), arguments)
        n = num_tokens(sampling.grid)
        tokens = self.layout.tokens_of(call)
        if self.key[0] == "double_block" and tokens.shape[1] != n:
            # Single-stream blocks, which run later, cannot tell them from text.
            sampling.has_references = True
        # In Wan 2.2, frames have modulations of their own: [b, f, 6, c].
        modulation = call.argument("vec")
        of_frames = isinstance(modulation, Tensor) and modulation.ndim > 3 and modulation.shape[1] > 1
        dense = sampling.has_references or call.has(self.layout.dense_if) or of_frames
        running = None if dense else sampling.merge_in(self.key, "all", tokens, self.layout, sampling.grid, 1)
        if running is None:
            return block(arguments)
        lost = sampling.of(self.key)
        plan = running.plan
        settings = running.settings
        if plan is None:
            image, text = call.result()
        else:
            sampling.running = running
            running.weighs = settings.proportional
            try:
                image, text = merged_call(call, self.layout, plan, settings.combine, change_only=True)
            finally:
                sampling.running = None
            if lost is not None:
                image = add_lost(self.layout, plan, image, lost, settings.combine)
        if plan is None or lost is not None:
            sampling.keep(self.key, added_to_image(self.layout, image, tokens, n))
        return {"img": image, "txt": text}  # None if a block returns no text, like the last one of SD 3


@dataclasses.dataclass(eq=False)
class BlockRun:
    """Blocks that have run one after another, each on the very tensors that the last one returned."""

    blocks: list[Hashable]
    returned: Tensors  # image and text that the last one returned
    added: Tensors  # what all of them added, in float32, since half precision would lose some of it


def block_in_run(sampling: Sampling, block: Hashable, arguments: dict[str, Any], run: Call) -> dict[str, Any]:
    """Return the result of a block that is skipped on some steps. ``run`` returns that of a full step.

    In a step that skips a run of blocks, the first one adds the extrapolated sum of what all of them added in
    full steps; the others return their input. The sum does not include what a ControlNet adds between two
    blocks, since ComfyUI adds it in steps that skip them too. Anything else between blocks begins a new run.
    """
    image = arguments["img"]
    text = arguments.get("txt")
    given = (image, text)
    distance = sampling.decision.deep
    known = sampling.of(("run", block))
    if distance is not None and known is not None:
        residual, _ = known
        if residual is not None:
            image, changed = extrapolated(residual, given, distance)
            text = text if changed is None else changed
        return {"img": image, "txt": text}
    # ComfyUI's blocks add to their input in place. The copies keep the input for the difference.
    copies = {name: arguments[name].clone() for name in ("img", "txt") if arguments.get(name) is not None}
    result = run({**arguments, **copies})
    returned = result["img"], result.get("txt")
    added = each(lambda after, before: (after - before).float(), returned, given)
    running: BlockRun | None = sampling.running_blocks
    if running is not None and _continues(running, given, returned):
        running.returned = returned
        running.added = each(Tensor.add_, running.added, added)
        running.blocks.append(block)
    else:
        finish_run(sampling)
        sampling.running_blocks = BlockRun([block], returned, added)
    return result


def _continues(running: BlockRun, given: Tensors, returned: Tensors) -> bool:
    """Return whether a block was given the very tensors that the last one of a run returned."""
    last_image, last_text = running.returned
    image, text = given
    # A block that returns no text may get another one.
    return image is last_image and (text is last_text or returned[1] is None)


def finish_run(sampling: Sampling) -> None:
    """Cache the residual of the blocks that have run, if there are any, with their number."""
    running = sampling.running_blocks
    sampling.running_blocks = None
    if running is None:
        return
    sampling.ran.add("deep")
    first, *others = (("run", block) for block in running.blocks)
    before, blocks = sampling.of(first) or (None, 0)
    added = each(lambda total: total.to(running.returned[0].dtype), running.added)
    residual = updated(before if blocks == len(running.blocks) else None, added)
    sampling.keep(first, (residual, len(running.blocks)))
    for block in others:
        sampling.keep(block, (None, 0))
