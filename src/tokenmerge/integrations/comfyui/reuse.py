"""Step reuse in transformers, whose blocks are skipped in runs.

In a step that skips a run, its first block adds the extrapolated sum of what the blocks of the run added in
complete steps; the other blocks return their input. The sum does not include what a ControlNet adds between
two blocks, since ComfyUI also adds it in steps that skip the blocks. Anything else between two blocks begins
a new run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from tokenmerge.runtime.memory.reuse import Residual, extrapolated, updated

Tokens = tuple[Tensor | None, Tensor | None]  # of image and text


class BlockRuns:
    """The runs of blocks of one sampling. Each call of the model in a step has its own blocks, by key."""

    def __init__(self) -> None:
        # By block, the residual of the run that begins with it, and the number of blocks in it. None: another
        # block begins the run.
        self._known: dict[Hashable, tuple[Residual | None, int]] = {}
        self._open()

    def _open(self) -> None:
        # Consecutive blocks of this call, each on the very tensors that the last one returned; what the last
        # one returned; and what all of them added, in float32, since half precision would lose some of it.
        # None: a block returned no text.
        self._blocks: list[Hashable] = []
        self._returned: Tokens = None, None
        self._added: Tokens = None, None

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
                image, changed = extrapolated(residual, (image, text), distance)  # type: ignore[arg-type]
                text = text if changed is None else changed
            return {"img": image, "txt": text}
        # ComfyUI's blocks add to their input in place. The copies keep the input for the difference.
        copies = {name: arguments[name].clone() for name in ("img", "txt") if arguments.get(name) is not None}
        result = run({**arguments, **copies})
        new_image, new_text = result["img"], result.get("txt")
        last_image, last_text = self._returned
        if image is not last_image or not (text is last_text or new_text is None):
            self.finish()
        added = (new_image - image).float(), None if new_text is None else (new_text - text).float()
        if self._blocks:
            sums = zip(self._added, added, strict=True)
            added = tuple(None if one is None or other is None else one.add_(other) for one, other in sums)
        self._blocks.append(block)
        self._returned, self._added = (new_image, new_text), added
        return result

    def finish(self) -> None:
        """Cache the residual of the blocks that have run, if there are any."""
        image, _ = self._returned
        if image is not None:
            first, *others = self._blocks
            added = (None if total is None else total.to(image.dtype) for total in self._added)
            before, blocks = self._known.get(first, (None, 0))
            before = before if blocks == len(self._blocks) else None
            self._known |= dict.fromkeys(others, (None, 0))
            self._known[first] = updated(before, Residual(False, tuple(added))), len(self._blocks)
        self._open()
