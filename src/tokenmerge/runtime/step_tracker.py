"""Where in a generation a call is, and what it does there: merge, plan anew, correct."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenmerge.ops import bits

__all__ = ["Moment", "StepNumbers", "Turns", "moment_of", "waits_for"]


@dataclasses.dataclass(frozen=True)
class Moment:
    """A denoising step.

    Attributes:
        generation: what differs between generations.
        index: of the step among those of its scheduler, from 0.
        total: number of these.
        first: index of the generation's first step; image-to-image does not begin at 0.
        begins: whether its scheduler says that it is the first.
    """

    generation: object
    index: int
    total: int
    first: int = 0
    begins: bool = False

    def after(self, before: Moment | None) -> Moment:
        """This moment as one of the generation of ``before``, if it is; or else as the first of its own."""
        if before is not None and self.index >= before.index:
            same = self.generation is before.generation
            # Pipelines of tiles step each of them with its own copy of the scheduler's state. One that was
            # cut short, and image-to-image after it, look alike but for where that begins.
            follows = before.first < self.index <= before.index + 1 and not self.begins
            if same or (follows and _equal(self.generation, before.generation)):
                return dataclasses.replace(self, generation=before.generation, first=before.first)
        return dataclasses.replace(self, first=self.index)


def _equal(timesteps: object, others: object) -> bool:
    if not (isinstance(timesteps, Tensor) and isinstance(others, Tensor)):
        return False
    return timesteps.device == others.device and torch.equal(timesteps, others)


def moment_of(scheduler: Any, timestep: Tensor | float) -> Moment | None:
    """The step that a scheduler is at; None: it does not say.

    Args:
        scheduler: one of diffusers; ``set_timesteps`` begins a generation.
        timestep: that the model is called with, for schedulers that do not count.
    """
    timesteps = getattr(scheduler, "timesteps", None)
    if timesteps is None or len(timesteps) == 0 or _is_unused(scheduler):
        return None
    index = getattr(scheduler, "step_index", None)
    # Before the first step it is not counted yet. Image-to-image begins later than at the first.
    first = getattr(scheduler, "begin_index", None)
    index = first if index is None else index
    if index is None:
        index = _offset(timestep, timesteps)
    if index is None:
        now = float(torch.as_tensor(timestep).max())
        index = _place(now, timesteps, made=getattr(scheduler, "counter", 0))
        # Models of flow matching are told a share of the highest timestep, and 1 is also one of the last.
        if hasattr(scheduler, "step_index") and (index is None or now <= 1):
            index = 0
    if index is None or index >= len(timesteps):  # of a generation that is over
        return None
    return Moment(timesteps, int(index), len(timesteps), begins=index == first)


def waits_for(value: Tensor) -> bool:
    """Whether a tensor cannot be looked at without cost: in a graph, and on a device that is waited for."""
    return torch.compiler.is_compiling() or value.device.type != "cpu"


def _offset(timestep: object, timesteps: object) -> int | None:
    """Which of the timesteps this is, by where it lies in memory: looking at it would wait for its device."""
    if not (isinstance(timestep, Tensor) and isinstance(timesteps, Tensor)) or timesteps.ndim != 1:
        return None
    # One value, for each image of a batch.
    one = timestep.numel() == 1 or (timestep.numel() > 1 and not any(timestep.stride()))
    if not one or timestep.is_meta or timestep.dtype != timesteps.dtype:
        return None
    memory, stride = timesteps.untyped_storage().data_ptr(), timesteps.stride(0)
    if not memory or timestep.untyped_storage().data_ptr() != memory or stride < 1:  # 0: it has no address
        return None
    place, between = divmod(int(timestep.storage_offset() - timesteps.storage_offset()), stride)
    return place if not between and 0 <= place < len(timesteps) else None


def _is_unused(scheduler: Any) -> bool:
    """Whether its timesteps are still those of training: another one is in use."""
    training = getattr(getattr(scheduler, "config", None), "num_train_timesteps", None)
    return getattr(scheduler, "num_inference_steps", None) is None and len(scheduler.timesteps) == training


def _place(timestep: float, timesteps: Any, made: int) -> int | None:
    """Which of the timesteps a model is called with; None: it is in another unit.

    Args:
        timestep: that the model is called with.
        timesteps: of the scheduler.
        made: steps that it has made, which PNDM tells and which tells its equal timesteps apart.
    """
    scheduled = torch.as_tensor(timesteps, dtype=torch.float32).cpu()
    distance = (scheduled - timestep).abs()
    nearest = distance.min()
    if nearest > max(1.0, abs(timestep)) / 128:  # half precision is good to 1 in 256
        return None
    places = (distance == nearest).nonzero().flatten().tolist()
    return next((place for place in places if place >= made), places[-1])


class StepNumbers:
    """Makes integers that differ between denoising steps: the bits of their timesteps.

    The timestep rather than a counter: it is the same for the conditional and the unconditional half of
    classifier-free guidance, for every batch size, and in the second forward pass of gradient checkpointing.
    Training may give each sample of a batch its own timestep, and image-to-video models each token, with 0
    for the picture that is given; the latest counts for all.
    """

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[Tensor], int, Tensor] | None = None

    def of(self, timestep: Tensor | float, device: torch.device) -> Tensor:
        """The number of a step; the very tensor of the call before, if it is called with its timestep."""
        if not isinstance(timestep, Tensor) or not waits_for(timestep):
            return _bits(timestep, device)
        if torch.compiler.is_compiling() or timestep.is_inference():
            return _bits(timestep, device)  # nothing tells whether it was changed since
        if self._last is not None:
            last, version, number = self._last
            if last() is timestep and version == timestep._version and number.device == device:
                return number
        number = _bits(timestep, device)
        self._last = weakref.ref(timestep), timestep._version, number
        return number

    def __deepcopy__(self, memo: dict[int, Any]) -> StepNumbers:
        return StepNumbers()

    def __reduce__(self) -> tuple[Any, ...]:
        return StepNumbers, ()


def _bits(timestep: Tensor | float, device: torch.device) -> Tensor:
    latest = torch.as_tensor(timestep, device=device, dtype=torch.float32).max()
    return bits(latest)


@dataclasses.dataclass(eq=False)
class Turns:
    """Follows the calls of a generation; a pipeline may make several in each step, for prompts or tiles.

    Attributes:
        generation: the running one.
        first: its first step.
        last: its last step.
        index: the running step.
        number: of the running call in its step, from 0.
        planned: by that number, the step whose plan a call uses, and what that plan is for.
        corrected: by that number, how many calls ago one was dense, and the shape of the samples then.
        compared: by that number, what was looked at, how many times in a row with what answer.
        ran: by that number and part of the model, the last two steps in which it ran, and the shape of the
            samples then.
    """

    generation: object = None
    first: int = 0
    last: int = 0
    index: int = -1
    number: int = 0
    planned: dict[int, tuple[int, object]] = dataclasses.field(default_factory=dict)
    corrected: dict[int, tuple[int, tuple[int, ...] | None]] = dataclasses.field(default_factory=dict)
    compared: dict[int, tuple[object, int, bool]] = dataclasses.field(default_factory=dict)
    ran: dict[tuple[int, str], tuple[int | None, int, tuple[int, ...]]] = dataclasses.field(
        default_factory=dict
    )

    @property
    def is_last(self) -> bool:
        """Whether it is the last step."""
        return self.index >= self.last

    def note(self, moment: Moment) -> int | None:
        """Note a call.

        Returns:
            From which number on calls are not made any more, so that what they have left can go: 0 where a
            generation begins; where a step does, as many as the step before had; None: they still are.
        """
        begins = self.begins_with(moment)
        again = not begins and moment.index == self.index
        made = 0 if begins else self.number + 1
        self.generation, self.first = moment.generation, moment.first
        self.index, self.last = moment.index, moment.total - 1
        self.number = made if again else 0
        return None if again else made

    def begins_with(self, moment: Moment) -> bool:
        """Whether a call begins a generation."""
        return moment.generation is not self.generation or moment.index < self.index

    def plans(self, every: int, purpose: object) -> bool:
        """Whether the running call plans anew; note that it does.

        Args:
            every: for how many steps plans are used.
            purpose: what they are for, such as the shape of the sample; another one needs other plans.
        """
        index, before = self.planned.get(self.number, (None, None))
        due = index is None or before != purpose or self.index - index >= every
        if due:
            self.planned[self.number] = self.index, purpose
        return due

    def corrects(self, every: int, shape: tuple[int, ...]) -> bool:
        """Whether the running call is dense, as one in so many that run everything; note that it is."""
        since, seen = self.corrected.get(self.number, (every, None))
        due = seen != shape or since + 1 >= every
        self.corrected[self.number] = 0 if due else since + 1, shape
        return due

    def answer(self, question: object, look: Callable[[], bool]) -> bool:
        """What the running call finds, or what two steps in a row have found: looking waits for a device.

        Args:
            question: what is looked for, such as the shape of the sample; another one is looked for anew.
            look: finds the answer.
        """
        before, times, answer = self.compared.get(self.number, (None, 0, False))
        if before == question and times == 2:
            return answer
        found = look()
        times = times + 1 if before == question and found == answer else 1
        self.compared[self.number] = question, times, found
        return found

    def ahead(self, part: str, every: int, shape: tuple[int, ...]) -> float | None:
        """How far the running call goes on without a part of the model, which runs in one of so many steps.

        Returns:
            Steps since it ran, divided by those between the last two in which it ran; None: it runs, as it
            does until two steps say where its change is heading, and that is noted.
        """
        before, last, seen = self.ran.get((self.number, part), (None, -1, None))
        if seen == shape and before is not None and self.index - last < every:
            return (self.index - last) / (last - before)
        self.ran[self.number, part] = last if seen == shape else None, self.index, shape
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> Turns:
        return Turns()

    def __reduce__(self) -> tuple[Any, ...]:
        return Turns, ()
