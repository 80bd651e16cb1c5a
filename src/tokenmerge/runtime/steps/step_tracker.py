"""Tracks the calls of one generation, and decides once for each what it draws, runs and merges."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tokenmerge.config import ToMeConfig
from tokenmerge.ops.arithmetic import arithmetic
from tokenmerge.ops.once import once, version_of
from tokenmerge.plans.generation import Merging, StepKind, plan_generation
from tokenmerge.runtime.steps.calls import CallNumbers, Given, Shape
from tokenmerge.runtime.steps.making_good import Outputs
from tokenmerge.runtime.steps.scheduler import DenoisingStep, needs_sync


def step_seed(
    timestep: Tensor | float, device: torch.device, numbers: dict[tuple[int, torch.device], Tensor]
) -> Tensor:
    """Return an integer for random draws in a step: the bits of its timestep as a float32, int64.

    The timestep is taken and not a counter. It is the same for both halves of classifier-free guidance, for
    every batch size, and when gradient checkpointing runs a block again. In training each sample may have a
    timestep of its own, and image-to-video models give one to each token; the highest counts for all. The
    same timestep has the same tensor on a device: the latest of a thread is in its ``numbers``.
    """
    if not torch.compiler.is_compiling():
        if isinstance(timestep, Tensor) and needs_sync(timestep):
            if not timestep.is_inference():  # whose value may change unseen
                return once(timestep, ("bits", device), partial(_bits, timestep, device), timestep)
        elif device.type != "cpu":  # copying the number there would wait for the device
            known = int(_bits(timestep, torch.device("cpu"))), device
            if known not in numbers:
                numbers.clear()
                numbers[known] = torch.full((), known[0], device=device)
            return numbers[known]
    return _bits(timestep, device)


def _bits(timestep: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(timestep, Tensor) and timestep.ndim and not any(timestep.stride()):
        timestep = timestep[(0,) * timestep.ndim]  # pipelines expand one number
    latest = torch.as_tensor(timestep, device=device, dtype=torch.float32)
    return arithmetic().bits(latest.max() if latest.numel() > 1 else latest.view(()))


def number_of(seed: Tensor) -> float:
    """Return the timestep whose bits a number has; this waits for its device."""
    return float(seed.to(torch.int32).cpu().view(torch.float32))


def same_step(step: Tensor, other: Tensor) -> bool:
    """Return whether two numbers of steps are equal; a tensor equals itself without being read."""
    return step is other or torch.equal(step, other)


class SampleTracker:
    """Whether a call of a model is on the same sample, at the same step, as the one before it.

    Guidance calls a model on the same sample with several prompts: in one batch, or one call after another.
    They share a plan and what is drawn at random; guidance would amplify the difference of two plans.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Note a call whose sample cannot be found again."""
        self.repeated = False  # the running call is on the sample of the one before it
        self.result: Tensor | None = None  # of the call before it, where guidance is compared
        # The sample, its version and its step, or None if nobody can see whether another call is on it.
        self.last: tuple[weakref.ref[Tensor], int | None, Tensor] | None = None

    def begin_call(self, sample: Tensor, step: Tensor, gone: Callable[[object], None]) -> None:
        """Note a call; ``gone`` is called when its sample is freed, which pipelines do after the step."""
        version = version_of(sample)
        self.repeated = False
        if self.last is not None:
            last, known, step_then = self.last
            self.repeated = last() is sample and known == version and same_step(step_then, step)
        if not self.repeated:
            self.last = (weakref.ref(sample, gone), version, step)
            self.result = None


class StepTracker:
    """The calls of one model in one generation.

    A pipeline may call a model several times in a step, for prompts or tiles. A call has the number of the
    call of the step before that it continues. The tracker holds no generation, since it lives as long as
    that does.
    """

    def __init__(self) -> None:
        self.index = -1  # of the running step; −1 before the first
        self.done = 0  # steps of the generation before it
        self.steps = 0  # of the generation
        self.call = 0  # the running call
        self.plan_call = 0  # the one whose plans it uses
        self.is_last = False
        self.numbers = CallNumbers()
        # What a call leaves for the same call of later steps, by its number and a name.
        self.noted: dict[tuple[int, str], Any] = {}
        self._runs: dict[str, Shape] = {}  # the parts that the running call should run, with its shape

    def begin_step(self, step: DenoisingStep) -> list[int]:
        """Note the step of a call. As it begins, return the calls that the step before did not make."""
        if step.index == self.index:
            return []
        self.index = step.index
        self.done = step.done
        self.steps = step.steps
        self.is_last = step.index >= step.total - 1
        return self.numbers.begin_step()

    def begin_call(self, given: Given) -> None:
        """Note a call in the running step."""
        self.call = self.numbers.begin_call(given)
        self._runs = {}

    def begin_again(self) -> None:
        """Begin the running step again, after a call that was none of its own."""
        self.numbers = CallNumbers()

    @property
    def calls_on_sample(self) -> list[int]:
        """The calls of the running step that use the plans of one of them, which are on one sample."""
        made = self.numbers.made
        return made[made.index(self.plan_call) :] if self.plan_call in made else made[-1:]

    def forget(self, calls: Collection[int]) -> None:
        """Drop what some calls have left."""
        self.numbers.forget(calls)
        self.noted = {key: noted for key, noted in self.noted.items() if key[0] not in calls}

    def plans(self, every: int, purpose: object) -> bool:
        """Return whether the running call makes new plans, as for another purpose; note that it does."""
        index, before = self.noted.get((self.call, "plans"), (None, None))
        due = index is None or before != purpose or self.index - index >= every
        if due:
            self.noted[self.call, "plans"] = self.index, purpose
        return due

    def corrects(self, every: int, shape: Shape) -> bool:
        """Return whether a correction is due, as in one of ``every`` full steps of a shape; note it."""
        since, seen = self.noted.get((self.call, "correction"), (every, None))
        due = seen != shape or since + 1 >= every
        self.noted[self.call, "correction"] = 0 if due else since + 1, shape
        return due

    def measure_next(self, call: int) -> None:
        """Let a call measure what merging loses in its next full step."""
        self.noted.pop((call, "correction"), None)

    def answer(self, question: object, look: Callable[[], bool]) -> bool:
        """Return the answer to a question, for which ``look`` has to wait for the device.

        The device is asked until two steps in a row have given the same answer to the same question.
        """
        before, times, answer = self.noted.get((self.call, "answer"), (None, 0, False))
        if before != question or times < 2:
            found = look()
            times = times + 1 if before == question and found == answer else 1
            self.noted[self.call, "answer"] = question, times, found
            return found
        return bool(answer)

    def made_good(self, result: Any, runs: bool, sigmas: Tensor | None) -> Any:
        """Return the result of the running call, with what forecasts missed made good in a full step.

        ``sigmas`` are the noise levels of the steps, or None where nothing is made good.
        """
        outputs = self.noted.pop((self.call, "outputs"), Outputs())
        if sigmas is None:
            return result
        if not self.is_last:
            self.noted[self.call, "outputs"] = outputs
        return outputs.note(self.index, runs, result, sigmas)

    def extrapolation(self, part: str, runs: bool, shape: Shape, holds: bool = True) -> Tensor | None:
        """Return how far the running call extrapolates a part of the model, or None if the part should run.

        A part that ``holds`` can be skipped after a single run, with a distance of 0: it takes two runs to
        know how its residual changes.
        """
        _, _, seen = self.noted.get((self.call, part), (None, None, None))
        if seen == shape and not runs:
            known = self.forecast(part, shape)
            if known is not None or holds:
                return torch.tensor(0.0 if known is None else known[0])
        self._runs[part] = shape
        return None

    def note_runs(self, parts: Collection[str]) -> bool:
        """Note which parts the running call ran, and return whether it ran all that it should."""
        for part, shape in self._runs.items():
            if part in parts:
                _, last, seen = self.noted.get((self.call, part), (None, None, None))
                self.noted[self.call, part] = last if seen == shape else None, self.index, shape
        return self._runs.keys() <= set(parts)

    def forecast(self, part: str, shape: Shape) -> tuple[float, int] | None:
        """Return how far an extrapolation has to reach, and the steps since the part ran.

        The first is these steps divided by the interval between the last two runs. The result is None if the
        part has not run twice with this shape.
        """
        before, last, seen = self.noted.get((self.call, part), (None, 0, None))
        if before is None or seen != shape:
            return None
        since = self.index - last
        return since / (last - before), since


@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """What one call of a model runs and merges."""

    kind: StepKind = StepKind.FULL
    merging: Merging = Merging.MERGES
    caches: bool = False  # what runs is cached, for steps that skip it
    corrects: bool = False  # some step of the generation measures the error of merging
    # How far blocks or deep stages are extrapolated, or None if they run. It is a tensor, so that one graph
    # fits all distances.
    deep: Tensor | None = None
    finest: Tensor | None = None  # the same for the finest level of a UNet
    # By StepTracker.forecast, of "deep" and "finest", whether they run or not.
    forecasts: Mapping[str, tuple[float, int] | None] = dataclasses.field(default_factory=dict)


def decide(config: ToMeConfig, tracker: StepTracker, shape: Shape) -> Decision:
    """Follow the generation plan in the running call, as far as what is cached for this shape allows it."""
    if tracker.index < 0:
        return Decision(corrects=config.correction.on)
    planned = plan_generation(config, tracker.steps)[tracker.done]
    kind = planned.kind
    merging = planned.merging
    deep: Tensor | None = None
    finest: Tensor | None = None
    forecasts: dict[str, tuple[float, int] | None] = {}
    if planned.caches:
        forecasts = {part: tracker.forecast(part, shape) for part in ("deep", "finest")}
        deep = tracker.extrapolation("deep", kind is StepKind.FULL, shape, "deep" in planned.holds)
        # A full step runs the finest level of a UNet too.
        runs_finest = deep is None or kind is not StepKind.SKIPPED
        finest = tracker.extrapolation("finest", runs_finest, shape, "finest" in planned.holds)
        if deep is None:
            kind = StepKind.FULL
        elif finest is None:
            kind = StepKind.SHALLOW
        else:
            kind = StepKind.SKIPPED
    if planned.if_due is not None and kind is StepKind.FULL:
        # As planned, unless the model joins late, or the shape of its sample changes.
        merging = planned.if_due if tracker.corrects(config.correction.every, shape) else Merging.MERGES
    return Decision(kind, merging, planned.caches, config.correction.on, deep, finest, forecasts)
