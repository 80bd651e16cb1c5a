"""What happened in the latest generation of a patched model, for its handle to tell."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tokenmerge.config import ToMeConfig

# "merged": the whole model runs, and tokens merge. "unmerged": it runs, and no token merges. Both are
# complete steps. "reused": a part of the model is skipped.
StepKind = Literal["merged", "unmerged", "reused"]


class ForecastError(NamedTuple):
    """How wrong a forecast of step reuse would have been, in a step that ran the part.

    Attributes:
        step: number of steps of the generation before it.
        part: ``"deep"`` for blocks and deep stages, ``"finest"`` for the finest level of a UNet.
        gap: steps since the part ran before.
        error: length of the error divided by that of the truth, for each image, float32.
    """

    step: int
    part: str
    gap: int
    error: Tensor


class RunLog:
    """What happened in one generation so far. Its numbers are known without waiting for the device.

    Attributes:
        config: settings of the generation.
        guidance: scale of classifier-free guidance; None: unknown.
        batch: batch size of a call of the model.
        height: height of the sample (for latent diffusion, of the latents); None: nothing reads it.
        width: width of the sample, likewise.
        references: height and width of each reference picture in the sequence of the sample.
        tokens: number of tokens at the finest level, over all frames of a video and all references.
        errors: of the forecasts of step reuse.
        steps: number of denoising steps of the generation; None: unknown.
    """

    def __init__(
        self,
        config: ToMeConfig,
        batch: int,
        grids: tuple[tuple[int, int, int], ...],
        patch: int,
        steps: int | None,
        guidance: float | None = None,
    ) -> None:
        self.config, self.batch, self.steps, self.guidance = config, batch, steps, guidance
        sizes = tuple((rows * patch, columns * patch) for _, rows, columns in grids)
        self.height = sizes[0][0] if sizes else None
        self.width = sizes[0][1] if sizes else None
        self.references = sizes[1:]
        self.tokens = sum(frames * rows * columns for frames, rows, columns in grids)
        self.errors: list[ForecastError] = []
        self._read = 0
        self._kinds: dict[int, StepKind] = {}
        self._began = self._ended = time.perf_counter()

    def note_step(self, index: int, kind: StepKind) -> None:
        """Note what a step does. Of a step that calls the model several times, the last call counts."""
        self._kinds[index] = kind

    def note_end(self) -> None:
        """Note the time at the end of a call."""
        self._ended = time.perf_counter()

    def unread(self) -> list[ForecastError]:
        """Return the errors of forecasts that were noted since the last call."""
        read, self._read = self._read, len(self.errors)
        return self.errors[read:]

    @property
    def seconds(self) -> float:
        """Seconds from the first call of the model to the end of the last one.

        On an accelerator, the last operations may still run then.
        """
        return self._ended - self._began

    @property
    def kinds(self) -> Counter[StepKind]:
        """How many steps of each kind ran. Empty if the settings do not follow the steps."""
        return Counter(self._kinds.values())


def noted(errors: Sequence[ForecastError]) -> dict[str, dict[int, float]]:
    """Return errors of forecasts by part and step, each the largest of its images. This waits once."""
    if not errors:
        return {}
    found: dict[str, dict[int, float]] = {}
    largest = [one.error.max() for one in errors]
    values = torch.stack([one.to(largest[0].device) for one in largest]).cpu()
    for one, error in zip(errors, map(float, values), strict=True):
        of_part = found.setdefault(one.part, {})
        before = of_part.get(one.step, error)
        of_part[one.step] = before if math.isnan(before) else max(error, before)
    return found


def in_kinds(kinds: Counter[StepKind]) -> str:
    """Return how many steps were complete and reused, in words.

    >>> in_kinds(Counter(["unmerged", "merged", "reused"]))
    '2 complete, 1 of them unmerged, 1 reused'
    """
    complete = f"{kinds['merged'] + kinds['unmerged']} complete"
    if kinds["unmerged"]:
        complete += f", {kinds['unmerged']} of them unmerged"
    return f"{complete}, {kinds['reused']} reused"
