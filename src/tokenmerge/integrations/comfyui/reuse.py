"""Step reuse and correction in one sampling: what a call runs, and residuals cached for later calls.

Blocks of transformers are skipped in runs. In a step that skips a run, its first block adds the extrapolated
sum of what the blocks of the run added in complete steps; the other blocks return their input. The sum does
not include what a ControlNet adds between two blocks, since ComfyUI also adds it in steps that skip the
blocks. Anything else between two blocks begins a new run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from tokenmerge.config import ToMeConfig
from tokenmerge.runtime.memory.reuse import Residual, extrapolated, updated
from tokenmerge.runtime.steps.scheduler import DenoisingStep
from tokenmerge.runtime.steps.step_tracker import Decision, StepTracker, decide


class Residuals:
    """What parts of the model added in the last steps that ran them. Each sampling has its own.

    Attributes:
        decision: what the running call runs and merges.
    """

    def __init__(self) -> None:
        self.decision = Decision()
        self._tracker = StepTracker()
        self._kept: dict[tuple[int, Hashable], Residual] = {}

    @property
    def index(self) -> int:
        """Index of the running step; −1 before the first."""
        return self._tracker.index

    @property
    def call(self) -> int:
        """Number of the running call within its step."""
        return self._tracker.call

    def begin_call(self, config: ToMeConfig, step: DenoisingStep, same: tuple[object, ...]) -> None:
        """Decide what a call runs and merges.

        ``same`` is what the residuals depend on: prompts, and shape and place of the latents. Residuals of a
        call with another value are not reused.
        """
        self._tracker.begin_call(step)
        self.decision = decide(config, self._tracker, same)

    def of(self, part: Hashable) -> Residual | None:
        """Return the residual of a part of the model, from the same call of an earlier step."""
        return self._kept.get((self.call, part))

    def keep(self, part: Hashable, residual: Residual) -> None:
        """Cache the residual of a part in the running call."""
        self._kept[self.call, part] = residual


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """The place of a block in a run, from the last step that ran it.

    Attributes:
        residual: residual of the whole run, image and text, in its first block; None in the others.
        blocks: number of blocks of the run, in its first block.
    """

    residual: Residual | None = None
    blocks: int = 0


@dataclasses.dataclass(eq=False)
class OpenRun:
    """Consecutive blocks that have run in this call.

    Each got the very tensors that the previous one returned.

    Attributes:
        first: ComfyUI's name and number of the first block.
        image: the image tokens that the last block returned.
        text: the text tokens that the last block returned; None: it returned none.
        added: sums of what the blocks added to image and text, in float32, since half precision would lose
            some of it; None for a text that the last block does not return.
        blocks: number of blocks.
    """

    first: Hashable
    image: Tensor
    text: Tensor | None
    added: tuple[Tensor, Tensor | None]
    blocks: int = 1


class BlockRuns:
    """The runs of blocks of one sampling."""

    def __init__(self, residuals: Residuals) -> None:
        self._residuals = residuals
        self._places: dict[tuple[int, Hashable], Place] = {}
        self._running: OpenRun | None = None

    def call(
        self, block: Hashable, arguments: dict[str, Any], run: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the result of a block that is skipped on some steps.

        ``run`` computes the result of a complete step from arguments. It may change their image and text.
        """
        image, text, distance = arguments["img"], arguments.get("txt"), self._residuals.decision.deep
        known = self._places.get((self._residuals.call, block))
        if distance is not None and known is not None:
            if known.residual is None:
                return {"img": image, "txt": text}
            image, changed = extrapolated(known.residual, (image, text), distance)  # type: ignore[arg-type]
            return {"img": image, "txt": text if changed is None else changed}
        # ComfyUI's blocks add to their input in place. The copies keep the input for the difference.
        copies = {name: arguments[name].clone() for name in ("img", "txt") if arguments.get(name) is not None}
        result = run({**arguments, **copies})
        self._ran(block, image, text, result)
        return result

    def finish(self) -> None:
        """Cache the residual of the blocks that have run, if there are any."""
        running, self._running = self._running, None
        if running is None:
            return
        place = self._residuals.call, running.first
        image, text = running.added
        dtype = running.image.dtype
        residual = Residual(False, (image.to(dtype), None if text is None else text.to(dtype)))
        before = self._places.get(place)
        same = before is not None and before.blocks == running.blocks
        residual = updated(before.residual if same and before is not None else None, residual)
        self._places[place] = Place(residual, running.blocks)

    def _ran(self, block: Hashable, image: Tensor, text: Any, result: dict[str, Any]) -> None:
        running, new_image, new_text = self._running, result["img"], result.get("txt")
        to_image = (new_image - image).float()
        to_text = None if new_text is None else (new_text - text).float()
        if (
            running is None
            or image is not running.image
            or (new_text is not None and text is not running.text)
        ):
            self.finish()
            self._running = OpenRun(block, new_image, new_text, (to_image, to_text))
            return
        before = running.added[1]
        both = None if to_text is None or before is None else before.add_(to_text)
        running.added = running.added[0].add_(to_image), both
        running.image, running.text, running.blocks = new_image, new_text, running.blocks + 1
        self._places[self._residuals.call, block] = Place()
