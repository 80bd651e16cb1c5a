"""What outlives a call of a patched model: plans and residuals, owned by a generation or a thread."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from tokenmerge.config import MergeSettings, ToMeConfig
from tokenmerge.ops import Plan
from tokenmerge.plans import Tolerance
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
    """What one block, layer or stage caches between calls."""

    plans: dict[Call, Plan] = dataclasses.field(default_factory=dict)  # blocks may share the dictionary
    # What a block or layer added to each tensor of its result; None for those without image.
    residuals: dict[Call, Tensors] = dataclasses.field(default_factory=dict)
    # Of what steps skip, what takes its place: for a block a tokenmerge.runtime.blocks.skipping.BlockRun, for
    # a stage a residual, or tensors without memory in the shapes of a result that no running module reads.
    skippable: dict[Call, Any] = dataclasses.field(default_factory=dict)
    dense: bool = False  # a block or layer does not merge, since other people's code looks at it


class Memory:
    """All that one model caches between calls.

    It belongs to one generation. Where settings do not follow the steps, it belongs to one thread. The
    ``groups`` say for each part of the model (block, layer or stage) with which parts it shares its plans.
    """

    def __init__(self, groups: Sequence[Hashable]) -> None:
        self.tracker = StepTracker()
        self.sample = SampleTracker()
        self.seed: Tensor | None = None  # the number that draws of the running step depend on
        self.config: ToMeConfig | None = (
            None  # at the generation's guidance scale; None before its first call
        )
        self.tolerance: Tolerance | None = None  # what changes the settings while the generation runs
        # The scheduler's, where settings do not follow the steps; others begin a generation.
        self.timesteps: Any = None
        self.log: RunLog | None = None
        # What guidance changed in the results of the last step, by the call that planned.
        self.guidance_differences: dict[int, Tensor] = {}
        # What all blocks of a level added to the tokens of the image, by the call of the first block and its
        # level.
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


class BlockMerge(NamedTuple):
    """What a block merges in its running call, with the settings of the step."""

    settings: MergeSettings
    is_dense: bool = True
    images: int = 0  # in its input, unless it is dense
    tokens: int = 0  # of each, padding included
    plan: Plan | None = None  # None on a correction step, which measures what merging would lose
