"""Where in a generation a call is, and what that means for merging."""

from __future__ import annotations

import dataclasses
from typing import Any

from tokenmerge.config import ToMeConfig
from tokenmerge.errors import ConfigError

__all__ = ["Clock", "Moment", "moment"]


@dataclasses.dataclass(eq=False)
class Clock:
    """Counts the denoising steps of a generation and the calls within one.

    Attributes:
        scheduler: that of the pipeline, which says how many steps a generation has and when one begins.
        steps: how many steps a generation has, where there is no scheduler.
        generation: how many generations have begun.
        index: the running step of its generation, from 0.
        turn: the running call of its step, from 0: pipelines that do not batch the two halves of
            classifier-free guidance make two.
        total: number of steps of the generation; None if unknown.
    """

    scheduler: Any = None
    steps: int | None = None
    generation: int = 0
    index: int = 0
    turn: int = 0
    total: int | None = None
    _timesteps: Any = None
    _last: float | None = None

    def tick(self, timestep: float) -> None:
        """Note a call of the model at a timestep."""
        timesteps = getattr(self.scheduler, "timesteps", None)
        if self._last is None or (timesteps is not None and timesteps is not self._timesteps):
            self.begin(self.steps)
            self._timesteps = timesteps
            if timesteps is not None:
                self.total = _steps_from(timestep, timesteps.tolist())
        elif timestep == self._last:
            self.turn += 1
        else:
            self.index, self.turn = self.index + 1, 0
        self._last = timestep

    def begin(self, steps: int | None) -> None:
        """Begin a generation of so many steps."""
        self.generation, self.index, self.turn = self.generation + 1, 0, 0
        self.steps = self.total = steps
        self._last = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Clock:
        """A copy of a model follows the same scheduler."""
        return Clock(self.scheduler, self.steps)

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled model is no part of a pipeline."""
        return Clock, (None, self.steps)


def _steps_from(timestep: float, timesteps: list[float]) -> int:
    """Number of steps from a timestep on, at which image-to-image may begin, to the last.

    >>> _steps_from(600, [800, 600, 600, 400, 200])
    3
    """
    distinct = list(dict.fromkeys(timesteps))
    # Models that are told the timestep in another form, such as t / 1000, begin at the first.
    return len(distinct) - (distinct.index(timestep) if timestep in distinct else 0)


@dataclasses.dataclass(frozen=True)
class Moment:
    """What a step does.

    Attributes:
        merges: whether tokens merge.
        corrects: whether it runs dense and keeps what merging would have lost.
        plans: whether it plans anew.
    """

    merges: bool = True
    corrects: bool = False
    plans: bool = True


def moment(config: ToMeConfig, index: int, total: int | None) -> Moment:
    """What step ``index`` of ``total`` does.

    >>> config = ToMeConfig(correct_every=3, until=0.75)
    >>> [moment(config, i, 8).corrects for i in range(8)]
    [True, False, False, True, False, False, False, False]
    >>> [moment(config, i, 8).merges for i in range(8)]
    [False, True, True, False, True, True, False, False]

    Raises:
        ConfigError: ``until`` is set and the number of steps is unknown.
    """
    if config.until < 1:
        if total is None:
            raise ConfigError(
                f"until={config.until:g} needs to know how many steps there are: apply token merging to the "
                "pipeline instead of its model, or wrap your own loop in `with patch.generation(steps=…):`"
            )
        if index >= round(config.until * total):
            return Moment(merges=False)
    if config.correct_every:
        due = index % config.correct_every == 0
        # A correction that no merged step would use is not worth its keeping.
        return Moment(merges=not due, corrects=due, plans=due)
    return Moment(plans=index % config.plan_every == 0)
