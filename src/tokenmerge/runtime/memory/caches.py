"""What outlives a call of a patched model: plans and residuals, owned by a generation or a thread."""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from tokenmerge.config import MergeSettings, ToMeConfig
from tokenmerge.ops import Plan
from tokenmerge.plans import Tolerance
from tokenmerge.runtime.memory.reuse import Residual
from tokenmerge.runtime.memory.run_log import RunLog
from tokenmerge.runtime.steps.guidance import SampleTracker
from tokenmerge.runtime.steps.scheduler import Generation
from tokenmerge.runtime.steps.step_tracker import StepTracker

# A call of a block, as two numbers. The first is that of the model's call in its step: pipelines make several
# calls in a step, for prompts or tiles. The second is that of the block's call within it: FreeNoise calls a
# block several times, for some frames after others.
Call = tuple[int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class BlockRun:
    """The place of a block in a run of blocks that are skipped together, from the last step that ran them.

    Attributes:
        single: whether the block returns one tensor, and not a pair.
        place: of the image's tokens in the pair.
        no_text: whether it returns no text.
        residual: of the whole run, image and text, in its first block; None in the others.
        blocks: of the run, in its first block.
    """

    single: bool
    place: int
    no_text: bool
    residual: Residual | None = None
    blocks: int = 0

    def returned(self, image: Tensor, text: Tensor | None) -> Any:
        """Return the tokens as the block returns them."""
        if self.single:
            return image
        other = None if self.no_text else text
        return (image, other) if self.place == 0 else (other, image)


@dataclasses.dataclass(eq=False)
class Cache:
    """What one block, layer or stage caches between calls.

    Attributes:
        plans: of a block; blocks that share plans share this dictionary.
        runs: of a block that is skipped on some steps.
        residuals: of the last steps in which it ran.
        placeholders: tensors without memory, in the shapes of a stage's result that no running module reads.
        dense: whether a block or layer does not merge, since other people's code looks at it.
    """

    plans: dict[Call, Plan] = dataclasses.field(default_factory=dict)
    runs: dict[Call, BlockRun] = dataclasses.field(default_factory=dict)
    residuals: dict[Call, Residual] = dataclasses.field(default_factory=dict)
    placeholders: dict[Call, Any] = dataclasses.field(default_factory=dict)
    dense: bool = False


def _no_generation() -> None:
    """Stand for a reference to a generation where there is none."""


class Memory:
    """All that one model caches between calls.

    It belongs to one generation. Where settings do not follow the steps, it belongs to one thread.

    Args:
        groups: for each part of the model (block, layer or stage), a number. Parts with the same number share
            their plans.

    Attributes:
        generation: returns the generation, or None where there is none, or it is over. It holds no reference:
            this object is dropped when its generation is.
        tracker: the calls of the generation.
        sample: whether a call is on the sample of the one before it.
        guidance_differences: what guidance changed in the results of the last step, by the call that planned.
        seed: number of the running step that draws depend on.
        config: settings at the guidance scale of the generation; None before its first call.
        tolerance: what changes these settings while the generation runs; None: nothing does.
        timesteps: of the scheduler, where settings do not follow the steps; others begin a generation.
        log: what happened in the generation; None before its first call.
        model_residuals: by the call of the first block and its level, what all blocks of the level added to
            each token of the image.
        caches: one for each part of the model.
    """

    def __init__(self, groups: Sequence[int], generation: Generation | None = None) -> None:
        self.generation: Callable[[], Generation | None] = (
            _no_generation if generation is None else weakref.ref(generation)
        )
        self.tracker = StepTracker()
        self.sample = SampleTracker()
        self.seed: Tensor | None = None
        self.config: ToMeConfig | None = None
        self.tolerance: Tolerance | None = None
        self.timesteps: Any = None
        self.log: RunLog | None = None
        self.guidance_differences: dict[int, Tensor] = {}
        self.model_residuals: dict[tuple[int, int, int], Tensor] = {}
        plans: dict[int, dict[Call, Plan]] = {group: {} for group in groups}
        self.caches = tuple(Cache(plans[group]) for group in groups)

    def forget(self, first: int = 0, last: int = sys.maxsize) -> None:
        """Drop the cached data of the calls with these numbers."""
        tracker = self.tracker
        by_number: tuple[dict[int, Any], ...] = (
            tracker.planned,
            tracker.corrected,
            tracker.compared,
            tracker.shapes,
            self.guidance_differences,
        )
        for noted in filter(None, by_number):
            for number in [number for number in noted if first <= number <= last]:
                del noted[number]
        _drop(tracker.ran, first, last)
        for cache in self.caches:
            if cache.plans:
                _drop(cache.plans, first, last)
        for cached in self._results():
            _drop(cached, first, last)

    def forget_results(self, number: int) -> None:
        """Drop the cached results of the calls with this number, but no plan."""
        for cached in self._results():
            _drop(cached, number, number)

    def forget_plans(self, number: int) -> None:
        """Drop the plans of the calls with this number."""
        for cache in self.caches:
            if cache.plans:
                _drop(cache.plans, number, number)

    def _results(self) -> Iterator[dict[Any, Any]]:
        """Yield the dictionaries of cached results that are not empty."""
        if self.model_residuals:
            yield self.model_residuals
        for cache in self.caches:
            for cached in (cache.runs, cache.residuals, cache.placeholders):
                if cached:
                    yield cached


def _drop(cached: dict[Any, Any], first: int, last: int) -> None:
    """Drop the entries whose key begins with a number in this range."""
    for call in [call for call in cached if first <= call[0] <= last]:
        del cached[call]


class RecordedCall(NamedTuple):
    """The settings that a call of a block ran with, and what it merged (None for nothing)."""

    settings: MergeSettings
    merge: Any


class RecordedCalls(WeakIdKeyDictionary):
    """Calls by the block's input tensor, as long as the tensor is alive. Copies and pickles begin empty."""

    def __deepcopy__(self, memo: dict[int, Any]) -> RecordedCalls:
        return RecordedCalls()

    def __reduce__(self) -> tuple[Any, ...]:
        return RecordedCalls, ()
