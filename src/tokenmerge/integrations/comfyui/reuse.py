"""Step reuse and correction in one sampling: what a call runs, and residuals cached for later calls."""

from __future__ import annotations

from collections.abc import Hashable

from tokenmerge.config import ToMeConfig
from tokenmerge.runtime.memory.reuse import Residual
from tokenmerge.runtime.steps.decide import Decision, decide
from tokenmerge.runtime.steps.scheduler import DenoisingStep
from tokenmerge.runtime.steps.step_tracker import StepTracker


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

        Args:
            config: settings of the sampling.
            step: step of the call.
            same: what the residuals depend on: prompts, and shape and place of the latents. Residuals of a
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
