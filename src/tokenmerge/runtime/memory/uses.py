"""Which threads run a model: a call of it, or a generation that is between two calls.

Each thread notes what it runs itself, so that nobody has to look into another thread. What it has noted ends
with the function call that it belongs to, whether that returns or raises: a mark in its frame lives as long.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import weakref
from functools import partial
from types import FrameType
from typing import Any

from tokenmerge.runtime.steps.pipeline import PerThread
from tokenmerge.runtime.steps.scheduler import DenoisingStep, Generation

# Held while a model is patched or restored, and for a moment as a call of one begins or ends.
CHANGES = threading.RLock()
if hasattr(os, "register_at_fork"):  # a child would wait for ever for a thread that it does not have
    os.register_at_fork(
        before=CHANGES.acquire, after_in_parent=CHANGES.release, after_in_child=CHANGES.release
    )

MARK = "_tokenmerge_mark"  # the name of the mark among the variables of a function call


class Mark:
    """Lives as long as the function call that it was left in."""


MarkRef = weakref.ref[Mark]


def mark_in(frame: FrameType) -> MarkRef:
    """Leave a mark in a function call of this thread, unless there is one. Return a reference to it."""
    variables = frame.f_locals
    mark = variables.get(MARK)
    if mark is None:
        mark = Mark()
        variables[MARK] = mark
    return weakref.ref(mark)


@dataclasses.dataclass(eq=False)
class RunningGeneration:
    """A generation that a thread runs, from its first call of the model on."""

    generation: weakref.ref[Generation] | None  # None if its steps are unknown
    mark: MarkRef | None  # of the call of its pipeline, or None in a loop of another kind
    is_over: bool = False
    index: int = -1  # of the latest step
    is_last: bool = False  # whether that is the last one
    calls: int = 0  # of the model in this step so far
    calls_before: int = 0  # of the model in the step before

    @property
    def runs(self) -> bool:
        """Whether more of the generation may follow."""
        if self.is_over or (self.generation is not None and self.generation() is None):
            return False
        return self.mark is None or self.mark() is not None

    def note_call(self, step: DenoisingStep | None) -> None:
        """Note a call of the model that begins."""
        self.is_over = False
        if step is None:
            return
        if step.index != self.index:
            self.index = step.index
            self.is_last = step.index >= step.total - 1
            self.calls_before = self.calls
            self.calls = 0
        self.calls += 1

    def note_end(self, failed: bool) -> None:
        """Note the end of a call. A loop is over with the last call of its last step."""
        has_all_calls = self.is_last and self.calls >= self.calls_before
        self.is_over = failed or (self.mark is None and has_all_calls)


@dataclasses.dataclass(eq=False)
class RunningCall:
    """A running call of a model."""

    mark: MarkRef  # such as that in the frame that called the model's hooks
    generation: RunningGeneration | None = None


class ThreadUse:
    """What one thread runs of a model."""

    def __init__(self) -> None:
        self.calls: list[RunningCall] = []  # each within the one before it
        self.generations: list[RunningGeneration] = []

    @property
    def runs(self) -> bool:
        """Whether the thread runs a call, or a generation between two calls."""
        calling = any(call.mark() is not None for call in tuple(self.calls))
        return calling or any(running.runs for running in tuple(self.generations))


class Uses:
    """The threads that run one model. Copies of the model begin with none."""

    def __init__(self) -> None:
        self._of_threads: weakref.WeakSet[ThreadUse] = weakref.WeakSet()  # a thread's ends with the thread
        self._own = PerThread(partial(_new_use, self._of_threads))

    def __deepcopy__(self, memo: dict[int, Any]) -> Uses:
        return Uses()

    def __reduce__(self) -> tuple[Any, ...]:
        return Uses, ()

    @property
    def calls_here(self) -> bool:
        """Whether this thread runs a call of the model."""
        return any(call.mark() is not None for call in self._own.value.calls)

    def begin_call(self, mark: Mark) -> None:
        """Note that this thread calls the model, until :meth:`end_call`, or for as long as a mark lives."""
        use = self._own.value
        if use.calls:  # without those that were interrupted
            use.calls = [call for call in use.calls if call.mark() is not None]
        use.calls.append(RunningCall(weakref.ref(mark)))

    def end_call(self, failed: bool) -> bool:
        """Note the end of this thread's innermost call. Return False where none was noted."""
        use = self._own.value
        if not use.calls:
            return False
        running = use.calls.pop().generation
        if running is not None:
            running.note_end(failed)
        return True

    def note_generation(self, step: DenoisingStep | None, pipe: Any) -> list[Generation]:
        """Note the generation that the running call belongs to.

        ``pipe`` is the pipeline on the call stack, or None. As another generation begins in this thread,
        those of loops are over, and those of pipelines whose call has ended. Return the latter.
        """
        use = self._own.value
        ended = []
        generation = None if step is None else step.generation
        running = next((one for one in use.generations if _is_of(one, generation)), None)
        if running is None:
            mark = None if pipe is None else mark_in(_call_of(pipe))
            if generation is None and mark is None:
                return []  # a call by itself
            for one in use.generations:
                if one.mark is not None and not one.runs and one.generation is not None:
                    ended.append(one.generation())
            use.generations = [one for one in use.generations if one.mark is not None and one.runs]
            running = RunningGeneration(None if generation is None else weakref.ref(generation), mark)
            use.generations.append(running)
        elif running.mark is not None and running.mark() is None:
            running.mark = None  # each call of the pipeline makes some of the steps
        running.note_call(step)
        if use.calls:
            use.calls[-1].generation = running
        return [generation for generation in ended if generation is not None]

    def elsewhere(self) -> bool:
        """Return whether another thread runs the model."""
        use_of_this_thread = self._own.value
        return any(use.runs for use in list(self._of_threads) if use is not use_of_this_thread)


def _new_use(known: weakref.WeakSet[ThreadUse]) -> ThreadUse:
    with CHANGES:
        use = ThreadUse()
        known.add(use)
    return use


def _is_of(running: RunningGeneration, generation: Generation | None) -> bool:
    """Return whether a note is of a generation; one without steps is known by the call of its pipeline."""
    if generation is None or running.generation is None:
        return generation is None and running.generation is None and running.runs
    return running.generation() is generation


def _call_of(pipe: Any) -> FrameType:
    """Return the outermost call of a method of a pipeline, among those that run in this thread."""
    frame: FrameType | None = sys._getframe(1)
    found = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",) and frame.f_locals.get("self") is pipe:
            found = frame
        frame = frame.f_back
    return found
