"""What each step of a generation did, recorded on request for the handle to tell."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import torch
from torch import Tensor

from tokenmerge.runtime.memory.caches import WeakDictionary
from tokenmerge.runtime.memory.run_log import StepKind
from tokenmerge.runtime.steps.pipeline import PerThread
from tokenmerge.runtime.steps.scheduler import DenoisingStep


@dataclasses.dataclass(frozen=True)
class StepRow:
    """What one denoising step did.

    Attributes:
        step: index of the step among those of its scheduler, from 0.
        kind: ``"merged"``: the whole model ran, and tokens merged. ``"unmerged"``: it ran, and no
            token merged. Both are complete steps. ``"reused"``: a part of the model was skipped.
        blocks: number of block calls that merged, over all calls of the model in the step.
        tokens: tokens of the largest of these calls; None: no block merged.
        merged_tokens: what was left of them after merging; None: no block merged.
        change: ‖x_t − x_{t−1}‖ / ‖x_{t−1}‖ of the model's result x, compared with the step before; None:
            there is nothing to compare with, or the change is no finite number.
        seconds: time in the model, ≥ 0, over all its calls in the step. Solver and decoder are not in it.
    """

    step: int
    kind: StepKind
    blocks: int
    tokens: int | None
    merged_tokens: int | None
    change: float | None
    seconds: float


class Stopwatch:
    """Takes the time from its making to :meth:`stop`, without waiting for the device.

    CUDA's own events count, or else the clock of the program, when last operations may still be running.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._began = self._ended = self._now()

    def _now(self) -> Any:
        if self._stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def stop(self) -> None:
        """Take the time up to now."""
        self._ended = self._now()

    def seconds(self) -> float:
        """Wait for the device, and return the time."""
        if self._stream is None:
            return float(self._ended - self._began)
        self._ended.synchronize()
        return float(self._began.elapsed_time(self._ended)) / 1000


@dataclasses.dataclass(eq=False)
class _Step:
    """What was measured of a step so far. Tensors are read later, since reading waits for the device."""

    kind: StepKind
    plans: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    watches: list[Stopwatch] = dataclasses.field(default_factory=list)  # of each call
    # [2], of each call: sums of squares of the change, and of the result before.
    squares: list[Tensor] = dataclasses.field(default_factory=list)

    def row(self, index: int) -> StepRow:
        tokens, merged_tokens = max(self.plans, default=(None, None))
        squares = sum((pair.double().cpu() for pair in self.squares), torch.zeros(2, dtype=torch.float64))
        changed, before = squares.sqrt().tolist()
        change = changed / before if before and math.isfinite(changed / before) else None
        seconds = sum(watch.seconds() for watch in self.watches)
        return StepRow(index, self.kind, len(self.plans), tokens, merged_tokens, change, seconds)


class StepLog:
    """The steps of one generation. Reading its rows waits for the device; noting them does not."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}
        self._latest = _Step("unmerged")
        self._before: list[Tensor | None] = []  # results of the calls of the step before
        self._results: list[Tensor | None] = []  # of this step

    def begin_call(self, step: DenoisingStep, kind: StepKind, device: torch.device) -> None:
        """Note a call of the model. Where a step makes several calls, the last one decides its kind."""
        if self._steps.get(step.index) is not self._latest:
            self._before, self._results = self._results, []
            self._steps[step.index] = self._latest = _Step(kind)
        self._latest.kind = kind
        self._latest.watches.append(Stopwatch(device))

    def note_plan(self, tokens: int, merged_tokens: int) -> None:
        """Note a block call that merges."""
        self._latest.plans.append((tokens, merged_tokens))

    def end_call(self, result: Any) -> None:
        """Note the end of a call, and what the model returned."""
        self._latest.watches[-1].stop()
        number, made = len(self._results), _one_tensor(result)
        before = self._before[number] if number < len(self._before) else None
        self._results.append(made)
        if made is not None and before is not None and made.shape == before.shape:
            exact = before.to(torch.promote_types(before.dtype, torch.float32))
            squares = (made - exact).square().sum(), exact.square().sum()
            self._latest.squares.append(torch.stack(squares))

    def forget_results(self) -> None:
        """Drop the results that the next step would be compared with."""
        self._before, self._results = [], []

    def rows(self) -> tuple[StepRow, ...]:
        """Return what each step did, in the order of the steps."""
        return tuple(step.row(index) for index, step in sorted(self._steps.items()))


class StepRecorder(WeakDictionary):
    """The logs of a model, one for each living generation. Copies and pickles begin empty."""

    def __init__(self) -> None:
        super().__init__()
        self._last: StepLog | None = None
        self._last_of_thread: PerThread[list[StepLog]] = PerThread(list)

    def begin_call(self, step: DenoisingStep, kind: StepKind, device: torch.device) -> StepLog:
        """Note a call of the model, and return the log of its generation."""
        log: StepLog | None = self.get(step.generation)
        if log is None:
            log = self[step.generation] = self._last = StepLog()
            self._last_of_thread.value[:] = [log]
        log.begin_call(step, kind, device)
        return log

    @property
    def last(self) -> StepLog | None:
        """The log of the generation that began last in this thread, or in any thread if this one had none."""
        return next(iter(self._last_of_thread.value), self._last)

    def forget_results(self) -> None:
        """Drop the results that next steps would be compared with, as the model is restored."""
        for log in self.values():
            log.forget_results()


def _one_tensor(result: Any) -> Tensor | None:
    """Return a copy of a model's result, flattened into one tensor. None: it holds no tensors with values."""
    made = result if isinstance(result, (Tensor, list)) else result[0]
    pictures = made if isinstance(made, list) else [made]
    if not all(isinstance(picture, Tensor) and not picture.is_meta for picture in pictures):
        return None
    return torch.cat([picture.detach().flatten() for picture in pictures])
