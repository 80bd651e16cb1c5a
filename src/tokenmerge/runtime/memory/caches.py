"""What outlives a call of a patched model: plans and residuals, owned by a generation or a thread."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from tokenmerge.config import MergeSettings, ToMeConfig
from tokenmerge.ops.plan import Plan
from tokenmerge.plans.tolerance import Tolerance
from tokenmerge.runtime.memory.reuse import Tensors
from tokenmerge.runtime.memory.run_log import RunLog
from tokenmerge.runtime.steps.guidance import SampleTracker
from tokenmerge.runtime.steps.step_tracker import StepTracker

# A call of a block, as two numbers. The first is that of the model's call in its step: pipelines make several
# calls in a step, for prompts or tiles. The second is that of the block's call within it: FreeNoise calls a
# block several times, for some frames after others.
Call = tuple[int, int]


@dataclasses.dataclass(eq=False)
class Cache:
    """What one block, layer or stage caches between calls.

    Attributes:
        plans: blocks that share plans share this dictionary.
        residuals: what a block or layer added to each tensor of its result; None for those without image.
        skippable: of what steps skip, what takes its place: for a block a
            :class:`tokenmerge.runtime.blocks.skipping.BlockRun`, for a stage a residual, or tensors without
            memory in the shapes of a result that no running module reads.
        dense: whether a block or layer does not merge, since other people's code looks at it.
    """

    plans: dict[Call, Plan] = dataclasses.field(default_factory=dict)
    residuals: dict[Call, Tensors] = dataclasses.field(default_factory=dict)
    skippable: dict[Call, Any] = dataclasses.field(default_factory=dict)
    dense: bool = False


class Memory:
    """All that one model caches between calls.

    It belongs to one generation. Where settings do not follow the steps, it belongs to one thread. The
    ``groups`` say for each part of the model (block, layer or stage) with which parts it shares its plans.

    Attributes:
        seed: the number that draws of the running step depend on.
        config: settings at the guidance scale of the generation; None before its first call.
        tolerance: what changes these settings while the generation runs; None: nothing does.
        timesteps: the scheduler's, where settings do not follow the steps; others begin a generation.
        guidance_differences: what guidance changed in the results of the last step, by the call that planned.
        model_residuals: what all blocks of a level added to the tokens of the image, by the call of the first
            block and its level.
    """

    def __init__(self, groups: Sequence[Hashable]) -> None:
        self.tracker = StepTracker()
        self.sample = SampleTracker()
        self.seed: Tensor | None = None
        self.config: ToMeConfig | None = None
        self.tolerance: Tolerance | None = None
        self.timesteps: Any = None
        self.log: RunLog | None = None
        self.guidance_differences: dict[int, Tensor] = {}
        self.model_residuals: dict[tuple[int, int, int], Tensor] = {}
        plans: dict[Hashable, dict[Call, Plan]] = {group: {} for group in groups}
        self.caches = tuple(Cache(plans[group]) for group in groups)

    def forget(self, first: int = 0, last: int = sys.maxsize) -> None:
        """Drop all that is cached of the calls with these numbers."""
        _drop(first, last, self.tracker.noted, self.guidance_differences)
        self.forget_plans(first, last)
        self.forget_results(first, last)

    def forget_results(self, first: int, last: int) -> None:
        """Drop the cached results of the calls with these numbers."""
        _drop(first, last, self.model_residuals)
        for cache in self.caches:
            _drop(first, last, cache.residuals, cache.skippable)

    def forget_plans(self, first: int, last: int) -> None:
        """Drop the plans of the calls with these numbers."""
        _drop(first, last, *(cache.plans for cache in self.caches))


def _drop(first: int, last: int, *dictionaries: dict[Any, Any]) -> None:
    """Drop the entries of some calls; keys are their numbers, or begin with them."""
    for cached in dictionaries:
        for key in tuple(cached):
            number = key if isinstance(key, int) else key[0]
            if first <= number <= last:
                del cached[key]


class WeakDictionary(WeakIdKeyDictionary):
    """A dictionary of objects that others own, compared by identity. Deep copies and pickles are empty."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return type(self)()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class BlockMerge(NamedTuple):
    """What a block merges in its running call, with the settings of the step.

    Unless it ``is_dense``, its input has ``images`` of ``tokens``, padding included. The plan is None on a
    correction step, which measures what merging would lose.
    """

    settings: MergeSettings
    is_dense: bool = True
    images: int = 0
    tokens: int = 0
    plan: Plan | None = None
