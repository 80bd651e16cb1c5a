"""Where in a generation a call is, and what it does there: merge, plan anew, correct."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

__all__ = ["Moment", "Turns", "moment_of"]


@dataclasses.dataclass(frozen=True)
class Moment:
    """A denoising step.

    Attributes:
        generation: what differs between generations, by identity.
        index: of the step among those of its scheduler, from 0.
        total: number of these.
    """

    generation: object
    index: int
    total: int


def moment_of(scheduler: Any, timestep: Tensor | float) -> Moment | None:
    """The step that a scheduler is at; None: it does not say.

    Args:
        scheduler: one of diffusers; ``set_timesteps`` begins a generation.
        timestep: that the model is called with, for schedulers that do not count.
    """
    timesteps = getattr(scheduler, "timesteps", None)
    if timesteps is None or len(timesteps) == 0:
        return None
    index = getattr(scheduler, "step_index", None)
    # Before the first step it is not counted yet. Image-to-image begins later than at the first.
    index = getattr(scheduler, "begin_index", None) if index is None else index
    if index is None:
        index = _place(timestep, timesteps, counts=hasattr(scheduler, "step_index"))
    return None if index is None else Moment(timesteps, int(index), len(timesteps))


def _place(timestep: Tensor | float, timesteps: Any, counts: bool) -> int | None:
    """Which of the timesteps a model is called with; the first, where a scheduler that counts cannot tell."""
    scheduled = torch.as_tensor(timesteps, dtype=torch.float32).cpu()
    distance = (scheduled - torch.as_tensor(timestep).detach().float().max().cpu()).abs()
    nearest = int(distance.argmin())
    # Models are told the timestep in half precision, to 1 in 256, or in another unit altogether.
    if distance[nearest] <= max(1.0, float(scheduled[nearest].abs())) / 128:
        return nearest
    return 0 if counts else None


@dataclasses.dataclass(eq=False)
class Turns:
    """Follows the calls of a generation; a pipeline may make several in each step, for prompts or tiles.

    Attributes:
        generation: the running one.
        first: its first step; image-to-image does not begin at 0.
        last: its last step.
        index: the running step.
        number: of the running call in its step, from 0.
        planned: by that number, the step whose plan a call uses, and the shape of its sample.
        corrected: by that number, the step whose corrections a call adds.
        ran: by that number, the last two steps whose blocks ran, and the shape of the sample then.
    """

    generation: object = None
    first: int = 0
    last: int = 0
    index: int = -1
    number: int = 0
    planned: dict[int, tuple[int, torch.Size]] = dataclasses.field(default_factory=dict)
    corrected: dict[int, int] = dataclasses.field(default_factory=dict)
    ran: dict[int, tuple[int | None, int, torch.Size]] = dataclasses.field(default_factory=dict)

    @property
    def is_last(self) -> bool:
        """Whether it is the last step."""
        return self.index >= self.last

    def note(self, moment: Moment) -> bool:
        """Note a call; whether it begins a generation."""
        begins = moment.generation is not self.generation or moment.index < self.index
        if begins:
            self.generation, self.first = moment.generation, moment.index
            self.planned, self.corrected, self.ran = {}, {}, {}
        self.number = self.number + 1 if not begins and moment.index == self.index else 0
        self.index, self.last = moment.index, moment.total - 1
        return begins

    def plans(self, every: int, shape: torch.Size) -> bool:
        """Whether the running call plans anew, where plans are used for so many steps; note that it does."""
        index, before = self.planned.get(self.number, (None, None))
        due = index is None or before != shape or self.index - index >= every
        if due:
            self.planned[self.number] = self.index, shape
        return due

    def corrects(self, planner: int) -> bool:
        """Whether the running call has no correction of the plan that call number ``planner`` made."""
        return self.corrected.get(self.number, -1) < self.planned[planner][0]

    def reuses(self, every: int, shape: torch.Size) -> bool:
        """Whether the running call can do without its blocks, which run in one of so many steps; note if not.

        Never before two steps have run, which say where a block's change is heading.
        """
        before, last, seen = self.ran.get(self.number, (None, -1, None))
        if seen == shape and before is not None and self.index - last < every:
            return True
        self.ran[self.number] = last if seen == shape else None, self.index, shape
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> Turns:
        return Turns()

    def __reduce__(self) -> tuple[Any, ...]:
        return Turns, ()
