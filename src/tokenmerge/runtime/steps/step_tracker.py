"""Tracks the calls of one generation: which step each belongs to, and what is due in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tokenmerge.runtime.steps.scheduler import DenoisingStep, StepFacts


@dataclasses.dataclass(eq=False)
class StepTracker:
    """The calls of one model in one generation.

    A pipeline may call a model several times in a step, for prompts or tiles. Calls are told apart by their
    number in the step, from 0.

    Attributes:
        step: the running step; None before the first.
        call: number of the running call.
        plan_call: number of the call whose plans the running one uses.
        planned: by call, the step in which its plans were made, and what they were for.
        corrected: by call, how many calls ago a correction step was, and the sample's shape then.
        compared: by call, a question, how many times in a row it got the same answer, and the answer.
        shapes: by call, the shape of the sample when it was last made.
        ran: by call and part of the model, the last two steps in which the part ran, and the sample's shape.
    """

    step: StepFacts | None = None
    call: int = 0
    plan_call: int = 0
    planned: dict[int, tuple[int, object]] = dataclasses.field(default_factory=dict)
    corrected: dict[int, tuple[int, tuple[object, ...] | None]] = dataclasses.field(default_factory=dict)
    compared: dict[int, tuple[object, int, bool]] = dataclasses.field(default_factory=dict)
    shapes: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    ran: dict[tuple[int, str], tuple[int | None, int, tuple[object, ...]]] = dataclasses.field(
        default_factory=dict
    )

    @property
    def index(self) -> int:
        """Index of the running step; −1 before the first."""
        return -1 if self.step is None else self.step.index

    @property
    def is_last(self) -> bool:
        """Whether the running step is the last one."""
        return self.step is not None and self.step.index >= self.step.total - 1

    def begin_call(self, step: DenoisingStep) -> int | None:
        """Note a call of the model.

        Returns:
            The first call number whose cache is stale. When a step begins, that is the number of calls in the
            step before it. None: the step continues.
        """
        again = step.index == self.index
        made = 0 if self.step is None else self.call + 1
        self.step, self.call = step.facts, made if again else 0
        return None if again else made

    def changes_shape(self, shape: tuple[int, ...]) -> bool:
        """Return whether the running call has another shape than at the step before; notes its shape."""
        before = self.shapes.get(self.call, shape)
        self.shapes[self.call] = shape
        return before != shape

    def plans(self, every: int, purpose: object) -> bool:
        """Return whether the running call makes new plans; notes that it does.

        Args:
            every: number of steps for which plans are used.
            purpose: what plans are for, such as the shape of the sample. Another purpose needs new plans.
        """
        index, before = self.planned.get(self.call, (None, None))
        due = index is None or before != purpose or self.index - index >= every
        if due:
            self.planned[self.call] = self.index, purpose
        return due

    def corrects(self, every: int, shape: tuple[object, ...]) -> bool:
        """Return whether a correction is due in the running call; notes that it is.

        Args:
            every: distance between corrections, counted in complete steps.
            shape: of the sample; another shape needs a correction of its own.
        """
        since, seen = self.corrected.get(self.call, (every, None))
        due = seen != shape or since + 1 >= every
        self.corrected[self.call] = 0 if due else since + 1, shape
        return due

    def answer(self, question: object, look: Callable[[], bool]) -> bool:
        """Return the answer to a question that needs a synchronisation with the device.

        The device is asked until two steps in a row have given the same answer.

        Args:
            question: such as the shape of the sample. A new question needs a new answer.
            look: returns the answer.
        """
        before, times, answer = self.compared.get(self.call, (None, 0, False))
        if before == question and times == 2:
            return answer
        found = look()
        times = times + 1 if before == question and found == answer else 1
        self.compared[self.call] = question, times, found
        return found

    def extrapolation(
        self, part: str, runs: bool, shape: tuple[object, ...], holds: bool = True
    ) -> float | None:
        """Return how far the running call extrapolates a part of the model.

        Args:
            part: of the model.
            runs: whether it is one of the steps that run the part.
            shape: of the sample, and what else must be as it was.
            holds: whether the part can be skipped after a single run. Its residual then stays as it is,
                because it takes two runs to know how it changes.

        Returns:
            Steps since the part ran, divided by the interval between its last two runs; 0 after a single
            run. None: the part runs now, and this is noted.
        """
        _, last, seen = self.ran.get((self.call, part), (None, -1, None))
        if seen == shape and not runs:
            distance = self.distance(part, shape)
            if distance is not None:
                return distance
            if holds:
                return 0.0
        self.ran[self.call, part] = last if seen == shape else None, self.index, shape
        return None

    def distance(self, part: str, shape: tuple[object, ...]) -> float | None:
        """Return the steps since a part ran, divided by the interval between its last two runs.

        None: it has not run twice with this shape of the sample.
        """
        before, last, seen = self.ran.get((self.call, part), (None, -1, None))
        return None if before is None or seen != shape else (self.index - last) / (last - before)

    def gap(self, part: str) -> int:
        """Return the steps since a part ran; 0: it has not run."""
        _, last, _ = self.ran.get((self.call, part), (None, self.index, None))
        return self.index - last
