"""Step reuse in transformers, whose blocks are skipped in runs.

In a step that skips a run, its first block adds the extrapolated sum of what the blocks of the run added in
complete steps; the other blocks return their input. The sum does not include what a ControlNet adds between
two blocks, since ComfyUI also adds it in steps that skip the blocks. Anything else between two blocks begins
a new run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from tokenmerge.runtime.memory.reuse import Residual, extrapolated, updated

Sums = tuple[Tensor | None, ...]


@dataclasses.dataclass(eq=False)
class OpenRun:
    """Consecutive blocks that have run in this call, each on the very tensors that the last one returned."""

    blocks: list[Hashable]  # keys of the blocks
    # The image and text tokens that the last block returned; None: it returned no text.
    returned: tuple[Tensor, Tensor | None]
    # What the blocks added to image and text, in float32, since half precision would lose some of it; None
    # for a text that the last block does not return.
    added: Sums

    def continues_with(self, image: Tensor, text: Tensor | None, has_text: bool) -> bool:
        """Return whether a block was called with these tokens; ``has_text``: it returns a text too."""
        last, known = self.returned
        return image is last and (text is known or not has_text)

    def add(self, block: Hashable, returned: tuple[Tensor, Tensor | None], added: Sums) -> None:
        """Add the next block."""
        sums = zip(self.added, added, strict=True)
        self.added = tuple(None if one is None or other is None else one.add_(other) for one, other in sums)
        self.blocks.append(block)
        self.returned = returned


class BlockRuns:
    """The runs of blocks of one sampling. Each call of the model in a step has its own blocks, by key."""

    def __init__(self) -> None:
        # By block, the residual of the run that begins with it, and the number of blocks in it. None: another
        # block begins the run.
        self._known: dict[Hashable, tuple[Residual | None, int]] = {}
        self._open: OpenRun | None = None

    def call(
        self,
        block: Hashable,
        distance: Tensor | None,
        arguments: dict[str, Any],
        run: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> dict[str, Any]:
        """Return the result of a block that is skipped on some steps.

        Args:
            block: key of the block in this call of the model.
            distance: how far it is extrapolated; None: it runs.
            arguments: of the block.
            run: computes the result of a complete step from arguments. It may change their image and text.
        """
        image, text = arguments["img"], arguments.get("txt")
        if distance is not None and block in self._known:
            residual, _ = self._known[block]
            if residual is not None:
                image, changed = extrapolated(residual, (image, text), distance)
                text = text if changed is None else changed
            return {"img": image, "txt": text}
        # ComfyUI's blocks add to their input in place. The copies keep the input for the difference.
        copies = {name: arguments[name].clone() for name in ("img", "txt") if arguments.get(name) is not None}
        result = run({**arguments, **copies})
        returned = result["img"], result.get("txt")
        pairs = zip(returned, (image, text), strict=True)
        added = tuple(None if after is None else (after - before).float() for after, before in pairs)
        last = self._open
        if last is None or not last.continues_with(image, text, has_text=returned[1] is not None):
            self.finish()
            self._open = OpenRun([block], returned, added)
        else:
            last.add(block, returned, added)
        return result

    def finish(self) -> None:
        """Cache the residual of the blocks that have run, if there are any."""
        run, self._open = self._open, None
        if run is None:
            return
        first, *others = run.blocks
        dtype = run.returned[0].dtype
        latest = tuple(None if total is None else total.to(dtype) for total in run.added)
        before, blocks = self._known.get(first, (None, 0))
        residual = updated(before if blocks == len(run.blocks) else None, latest)
        self._known |= {first: (residual, len(run.blocks)), **dict.fromkeys(others, (None, 0))}
