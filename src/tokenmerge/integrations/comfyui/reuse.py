"""Step reuse and correction in one sampling: what is due in a call, and residuals cached for later calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from torch import Tensor

from tokenmerge.config import ToMeConfig
from tokenmerge.runtime.due import correction_due, reuse_of
from tokenmerge.runtime.reuse import Residual
from tokenmerge.runtime.scheduler import DenoisingStep
from tokenmerge.runtime.step_tracker import StepTracker


@dataclasses.dataclass(frozen=True, eq=False)
class Due:
    """What is due in one call of the model.

    Attributes:
        number: number of the call within its step.
        deep: how far blocks or deep stages are extrapolated; None: they run.
        shallow: how far the finest level of a UNet is extrapolated; None: it runs.
        caches: whether residuals are cached for calls that skip something.
        corrects: whether the call runs dense and caches what merging loses in others.
    """

    number: int = 0
    deep: Tensor | None = None
    shallow: Tensor | None = None
    caches: bool = False
    corrects: bool = False


class Residuals:
    """What parts of the model added in the last steps that ran them. Each sampling has its own.

    Attributes:
        due: what is due in the running call.
    """

    def __init__(self) -> None:
        self.due = Due()
        self._tracker = StepTracker()
        self._kept: dict[tuple[int, Hashable], Residual] = {}

    @property
    def index(self) -> int:
        """Index of the running step; −1 before the first."""
        return self._tracker.index

    def begin_call(self, config: ToMeConfig, step: DenoisingStep, same: tuple[object, ...]) -> None:
        """Decide what is due in a call.

        Args:
            config: settings of the sampling.
            step: step of the call.
            same: what the residuals depend on: prompts, and shape and place of the latents. Residuals of a
                call with another value are not reused.
        """
        tracker = self._tracker
        tracker.begin_call(step)
        deep, shallow, caches = reuse_of(config, tracker, same)
        corrects = False
        if deep is None and config.schedule.merges(step.done, step.steps):
            corrects = correction_due(config, tracker, same)
        self.due = Due(tracker.call, deep, shallow, caches, corrects)

    def of(self, part: Hashable) -> Residual | None:
        """The residual of a part of the model, from the same call of an earlier step."""
        return self._kept.get((self.due.number, part))

    def keep(self, part: Hashable, residual: Residual) -> None:
        """Cache the residual of a part in the running call."""
        self._kept[self.due.number, part] = residual
