"""What happened in a generation of a patched model, and on request in each step, for its handle to tell."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from tokenmerge.config import ToMeConfig
from tokenmerge.errors import why
from tokenmerge.models.base import Grids
from tokenmerge.plans import Schedule
from tokenmerge.plans.estimate import Observations, noise_of
from tokenmerge.plans.generation import StepKind, least_kind
from tokenmerge.runtime.memory.caches import Residual
from tokenmerge.runtime.steps.noise_levels import NoiseLevels
from tokenmerge.runtime.steps.pipeline import PerThread, WeakDictionary
from tokenmerge.runtime.steps.scheduler import DenoisingStep
from tokenmerge.runtime.steps.step_tracker import Decision, StepTracker
from tokenmerge.warn import warn_caller

_TINY = torch.finfo(torch.float32).tiny

Result = TypeVar("Result")


class ForecastError(NamedTuple):
    """How wrong a forecast of step reuse would have been, in a step that ran the part."""

    step: int
    part: str  # "deep" for blocks and deep stages, "finest" for the finest level of a UNet
    gap: int  # the part ran so many steps before
    error: Tensor  # of the image that the model predicts, in the unit of the latents, for each image


@dataclasses.dataclass(eq=False)
class AddedNoise:
    """How much noise a scheduler adds, measured once in a generation, from two steps without a setting of it.

    A step keeps a share of the noise in its sample: that of the noise levels where the scheduler adds none.
    """

    kept: Tensor | None = None  # the share; None until it is measured
    levels: tuple[float, float] = (1.0, 1.0)  # before and after the step in which it was measured
    before: tuple[int, Tensor, Tensor] | None = None  # a step to compare: index, sample, image

    def note(self, levels: NoiseLevels, sample: Tensor, image: Tensor, index: int) -> None:
        """Note the sample that the model gets in a step, and the image that it predicts from it."""
        before = self.before
        self.before = None
        if self.kept is not None:
            return
        sample = levels.scaled(sample, index)
        if before is not None and before[0] == index - 1 and before[1].shape == sample.shape:
            noise = (before[1] - before[2]).flatten()
            self.kept = torch.dot(noise, (sample - before[2]).flatten()) / noise.square().sum()
            self.levels = levels.sigmas[index - 1], levels.sigmas[index]
        elif index and 0 < levels.sigmas[index + 1] < levels.sigmas[index]:
            self.before = index, sample, image


@dataclasses.dataclass(eq=False)
class RunLog:
    """What happened in one generation so far. Noting it does not wait for the device.

    What a generation does never depends on whether it can be observed: what notes something is called through
    :meth:`observe`.
    """

    config: ToMeConfig
    batch: int
    grids: Grids  # of the sample and its reference images; there are none where nothing reads them
    patch: int  # latent positions on a side of a token
    # None where it is unknown, as in the next two fields.
    steps: int | None
    guidance: float | None = None
    levels: NoiseLevels | None = None
    schedule: Schedule = Schedule()
    sample: Tensor | None = None  # of the running call, if it is a tensor
    # Of the running call: part, steps since it ran, and for each sample the length of error over change.
    missed: list[tuple[str, int, Tensor]] = dataclasses.field(default_factory=list)
    # By call in its step and part: when that last ran.
    outputs: dict[tuple[int, str], Tensor] = dataclasses.field(default_factory=dict)
    errors: list[ForecastError] = dataclasses.field(default_factory=list)
    noise: AddedNoise = dataclasses.field(default_factory=AddedNoise)
    last: Tensor | None = None  # the sum of the model's last output, if it is a tensor
    # Empty if the settings do not follow the steps.
    kind_of_step: dict[int, StepKind] = dataclasses.field(default_factory=dict)
    merging_steps: set[int] = dataclasses.field(default_factory=set)
    filled: int = 0  # steps before the first one, which filled a cache for the others and ran whole
    fills: int = 0  # calls beside all steps that filled a cache for them, and ran whole
    calls: int = 1  # of the model in a step
    misfits: int = 0  # calls whose sample follows from none of the step before, and that reused nothing
    seconds: float = 0.0  # to the end of the last call, whose operations an accelerator may still run
    # In the last step of the generation, the logs of all its models. As its call ends, they have ended.
    ending: Sequence[RunLog] = ()
    # The last step of the generation ran, in this model or in another one of the pipeline.
    ended: bool = False
    unseen: str = ""  # why the generation is observed no longer, or empty where it is observed

    def __post_init__(self) -> None:
        self.began = time.perf_counter()
        sizes = [(rows * self.patch, columns * self.patch) for _, rows, columns in self.grids]
        size: tuple[int | None, int | None] = sizes[0] if sizes else (None, None)
        self.height, self.width = size  # of the sample (for latent diffusion, of the latents)
        self.references = tuple(sizes[1:])  # of each reference image
        self.frames = self.grids[0][0] if self.grids else None  # of the sample's token grid

    def observe(self, look: Callable[..., Result], *given: Any) -> Result | None:
        """Call what only observes the generation, and return its result.

        An error in it costs a figure and not the image: the generation is then observed no longer. None is
        returned, as by all later calls.
        """
        if self.unseen:
            return None
        try:
            return look(*given)
        except Exception as error:
            self.give_up(error)
            return None

    def give_up(self, error: Exception) -> None:
        """Note why the generation is observed no longer, and drop what was kept to compare."""
        self.unseen = f"observing the generation failed: {type(error).__name__}: {why(error)}"
        self.sample = None
        self.last = None
        self.noise = AddedNoise()
        for kept in (self.missed, self.outputs, self.errors):
            kept.clear()

    def drop_tensors(self) -> None:
        """Drop what only later calls would compare; what is known of the closeness stays."""
        self.sample = None
        self.missed.clear()
        self.outputs = {}
        self.noise.before = None
        self.ending = ()

    def note_end(self) -> None:
        """Note the end of a call, and its time."""
        self.seconds = time.perf_counter() - self.began
        for log in self.ending:
            log.ended = True
        self.ending = ()

    def note_kind(self, index: int, kind: StepKind, merges: bool = False) -> None:
        """Note what a call does in a step. Of its calls, the one that runs least gives the step its kind."""
        self.kind_of_step[index] = least_kind(kind, self.kind_of_step.get(index, kind))
        if merges:
            self.merging_steps.add(index)

    def note_forecast(
        self, decision: Decision, copies: int, part: str, before: Residual | None, truth: Tensor
    ) -> None:
        """Compare what a part has added to the image with the forecast that ``before`` makes of it.

        What a forecast misses of a part's change, it is taken to miss of the change of the model's output.
        What that changes in the image that the model predicts follows from the noise level. So errors of
        all parts have one unit: that of the latents.
        """
        known = decision.forecasts.get(part)
        if known is None or before is None or self.sample is None:
            return
        first, delta, agreement = (tensors[0] for tensors in before)
        if truth.shape != first.shape:
            return
        samples = len(self.sample)
        change = truth - first
        error = torch.addcmul(change, delta, agreement * known[0], value=-1)  # as `extrapolated` forecasts it
        error, change = (
            _length(_guided(_of_samples(difference, samples), self.guidance, copies))
            for difference in (error, change)
        )
        self.missed.append((part, known[1], error / change.clamp(min=_TINY)))

    def note_output(self, decision: Decision, copies: int, tracker: StepTracker, result: Any) -> None:
        """Compare the model's result with those of earlier steps."""
        missed = self.missed
        self.missed = []
        sample = self.sample
        self.sample = None
        output = result if isinstance(result, Tensor) else result[0]
        if sample is None or not isinstance(output, Tensor) or sample.ndim != output.ndim:
            return  # such as a sample of token ids
        if tracker.is_last:
            self.last = output.detach().sum(dtype=torch.float32)
        if self.noise.kept is not None and decision.deep is not None and decision.finest is not None:
            return  # a step that skips all parts
        sample = sample.detach()
        output = output.detach()
        if _is_guided(sample, self.guidance, copies):
            sample = sample.chunk(copies)[0]
            output = _guided(output, self.guidance, copies)
        # Some models get more than the sample, or return more.
        common = tuple(slice(min(sizes)) for sizes in zip(sample.shape, output.shape, strict=True))
        sample = sample[common]
        output = output[common]
        index = tracker.index
        levels = self.levels
        weight = 1.0
        if levels is not None:
            weight = levels.weight(index)
            if tracker.call == 0 and self.noise.kept is None:
                self.noise.note(levels, sample, levels.picture(sample, output, index), index)
        for part, gap, error in missed:
            before = self.outputs.get((tracker.call, part))
            if before is not None and before.shape == output.shape:
                change = _length(output - before) * (weight / output[0].numel() ** 0.5)
                error = error.to(change.device)  # a model may be on several
                self.errors.append(ForecastError(tracker.done, part, gap, error * change))
        for part, skipped in (("deep", decision.deep), ("finest", decision.finest)):
            if skipped is None:
                self.outputs[tracker.call, part] = output
        if tracker.is_last:  # nothing will be compared with it
            self.outputs = {key: output for key, output in self.outputs.items() if key[0] != tracker.call}
            self.noise.before = None

    @property
    def all_steps(self) -> int | None:
        """The number of steps, with those that filled a cache."""
        return None if self.steps is None else self.steps + self.filled

    @property
    def kinds(self) -> Counter[StepKind]:
        """How many steps of each kind ran."""
        return Counter(self.kind_of_step.values())


def observations_of(logs: Sequence[RunLog]) -> Observations:
    """Return what a generation's logs show of its error, the largest of a batch. It waits for the device."""
    errors = [error for log in logs for error in log.errors]
    measured = [log.noise for log in logs if log.noise.kept is not None]
    del measured[1:]  # once for the generation
    lasts = [log.last for log in logs if log.last is not None]
    tensors: list[Any] = [
        *(error.error.max() for error in errors),
        *(noise.kept for noise in measured),
        *lasts,
    ]
    values = torch.stack([one.to(tensors[0].device) for one in tensors]).cpu().tolist() if tensors else []
    last = sum(values.pop() for _ in lasts)
    noise = noise_of(values.pop(), *measured[0].levels) if measured else 1.0
    found: dict[str, dict[int, float]] = {}
    for one, error in zip(errors, values, strict=True):
        of_part = found.setdefault(one.part, {})
        before = of_part.get(one.step, error)
        of_part[one.step] = before if math.isnan(before) else max(error, before)
    levels = next((log.levels.sigmas for log in logs if log.levels is not None), ())
    steps = next((log.steps for log in logs if log.steps is not None), 0)
    clips = any(log.levels is not None and log.levels.clips for log in logs)
    return Observations(found, levels[-steps - 1 :], noise, clips, last)


def _of_samples(tensor: Tensor, samples: int) -> Tensor:
    """Return a tensor of a part of the model as ``[samples, …]``, for each sample of the model's call.

    Models of videos fold frames or places into the batch, beside each other for each sample. A batch that
    does not fit counts as one sample.
    """
    return tensor.reshape(1 if len(tensor) % samples else samples, -1)


def _length(tensor: Tensor) -> Tensor:
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return torch.linalg.vector_norm(tensor.flatten(1), dim=1, dtype=dtype)


def _is_guided(tensor: Tensor, scale: float | None, copies: int) -> bool:
    """Return whether a batch holds what classifier-free guidance combines, and how it does is known."""
    return copies > 1 and scale is not None and len(tensor) % copies == 0


def _guided(tensor: Tensor, scale: float | None, copies: int) -> Tensor:
    """Return a tensor as classifier-free guidance combines it, if its batch holds both parts."""
    if scale is None or not _is_guided(tensor, scale, copies):
        return tensor
    unguided, guided, *_ = tensor.chunk(copies)
    return torch.lerp(unguided, guided, scale)


@dataclasses.dataclass(frozen=True)
class StepRow:
    """What one denoising step did.

    Attributes:
        step: index of the step among those of its scheduler, from 0.
        step_kind: ``"full"`` if the whole model ran, ``"shallow"`` if only the finest level of a UNet did, or
            ``"skipped"`` if no block did.
        merging_calls: number of calls of blocks that merged, over all calls of the model in the step.
        tokens: tokens of the largest of these calls, or None if no block merged.
        merged_tokens: what was left of them after merging, or None if no block merged.
        seconds: time in the model, ≥ 0, over all its calls in the step. Scheduler and decoder are not in it.
        sign: that of the step in the plan, such as ``"M"``, or an empty string if it is unknown.
    """

    step: int
    step_kind: Literal["full", "shallow", "skipped"]
    merging_calls: int
    tokens: int | None
    merged_tokens: int | None
    seconds: float
    sign: str = ""

    @property
    def kind(self) -> str:
        """The former words for :attr:`step_kind`: ``"merged"``, ``"unmerged"`` or ``"reused"``."""
        warn_caller(
            "StepRow.kind is deprecated; take StepRow.step_kind, which is 'full', 'shallow' or 'skipped'. "
            "merging_calls says whether tokens merged",
            DeprecationWarning,
        )
        if self.step_kind != "full":
            return "reused"
        return "merged" if self.merging_calls else "unmerged"


def clock(device: torch.device) -> Any:
    """Return the time: an event of CUDA, or else that of the program, when last operations may still run."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(began: Any, ended: Any) -> float:
    """Wait for the device, and return the time between two results of :func:`clock`."""
    if not isinstance(ended, torch.cuda.Event):
        return float(ended - began)
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1000


@dataclasses.dataclass(eq=False)
class _Step:
    """What was measured of a step so far. Times are read later, since reading waits for the device."""

    kind: StepKind
    plans: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    times: list[list[Any]] = dataclasses.field(default_factory=list)  # of each call: begin, and end

    def row(self, index: int) -> StepRow:
        tokens, merged_tokens = max(self.plans, default=(None, None))
        seconds = sum(seconds_between(times[0], times[-1]) for times in self.times)
        return StepRow(index, self.kind.value, len(self.plans), tokens, merged_tokens, seconds)


class StepLog:
    """The steps of one generation. Reading its rows waits for the device; noting them does not."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}
        self._latest = _Step(StepKind.FULL)

    def begin_call(self, step: DenoisingStep, kind: StepKind, device: torch.device) -> None:
        """Note a call of the model. Of several in a step, the one that runs least decides its kind."""
        if self._steps.get(step.index) is not self._latest:
            self._latest = _Step(kind)
            self._steps[step.index] = self._latest
        self._latest.kind = least_kind(kind, self._latest.kind)
        self._device = device
        self._latest.times.append([clock(device)])

    def note_plan(self, tokens: int, merged_tokens: int) -> None:
        """Note a block call that merges."""
        self._latest.plans.append((tokens, merged_tokens))

    def end_call(self) -> None:
        """Note the end of a call."""
        self._latest.times[-1].append(clock(self._device))

    def rows(self) -> tuple[StepRow, ...]:
        """Return what each step did, in the order of the steps."""
        return tuple(step.row(index) for index, step in sorted(self._steps.items()))


class StepRecorder(WeakDictionary):
    """The logs of a model, one for each living generation. Copies and pickles begin empty."""

    def __init__(self) -> None:
        super().__init__()
        self._last: StepLog | None = None
        self._last_of_thread: PerThread[StepLog | None] = PerThread(lambda: None)

    def begin_call(self, step: DenoisingStep, kind: StepKind, device: torch.device) -> StepLog:
        """Note a call of the model, and return the log of its generation."""
        log: StepLog | None = self.get(step.generation)
        if log is None:
            log = StepLog()
            self[step.generation] = log
            self._last = log
            self._last_of_thread.value = log
        log.begin_call(step, kind, device)
        return log

    @property
    def last(self) -> StepLog | None:
        """The log of the generation that began last in this thread, or in any thread if this one had none."""
        return self._last_of_thread.value or self._last
