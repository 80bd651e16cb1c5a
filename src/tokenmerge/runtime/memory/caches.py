"""What outlives a call of a patched model: plans and residuals, owned by a generation or a thread."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from tokenmerge.config import MergeSettings, ToMeConfig
from tokenmerge.ops import Plan
from tokenmerge.plans import Tolerance
from tokenmerge.runtime.memory.reuse import Residual
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

    Blocks that share plans share the dictionary ``plans``. ``runs`` has a
    :class:`tokenmerge.runtime.blocks.block_runs.BlockRun` for each call of a block that some steps skip, and
    ``placeholders`` tensors without memory in the shapes of a stage's result that no running module reads.
    A block or layer is ``dense`` where other people's code looks at it.
    """

    plans: dict[Call, Plan] = dataclasses.field(default_factory=dict)
    runs: dict[Call, Any] = dataclasses.field(default_factory=dict)
    residuals: dict[Call, Residual] = dataclasses.field(default_factory=dict)
    placeholders: dict[Call, Any] = dataclasses.field(default_factory=dict)
    dense: bool = False


class Memory:
    """All that one model caches between calls.

    It belongs to one generation. Where settings do not follow the steps, it belongs to one thread.

    Args:
        groups: for each part of the model (block, layer or stage), the group of parts that share its plans.

    Attributes:
        seed: number of the running step that draws depend on.
        config: settings at the guidance scale of the generation; None before its first call.
        tolerance: what changes these settings while the generation runs; None: nothing does.
        timesteps: the scheduler's, where settings do not follow the steps; others begin a generation.
        guidance_differences: what guidance changed in the results of the last step, by the call that planned.
        model_residuals: what all blocks of a level added to the tokens of the image, by the call of the first
            block and its level.
        caches: one for each part of the model.
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
        for noted in (self.tracker.noted, self.guidance_differences):
            _drop(noted, first, last)
        self.forget_plans(first, last)
        self.forget_results(first, last)

    def forget_results(self, first: int, last: int) -> None:
        """Drop the cached results of the calls with these numbers."""
        _drop(self.model_residuals, first, last)
        for cache in self.caches:
            for cached in filter(None, (cache.runs, cache.residuals, cache.placeholders)):
                _drop(cached, first, last)

    def forget_plans(self, first: int, last: int) -> None:
        """Drop the plans of the calls with these numbers."""
        for cache in self.caches:
            if cache.plans:
                _drop(cache.plans, first, last)


def _drop(cached: dict[Any, Any], first: int, last: int) -> None:
    """Drop the entries of some calls; keys are their numbers, or begin with them."""
    for key in tuple(cached):
        number = key if isinstance(key, int) else key[0]
        if first <= number <= last:
            del cached[key]


class EmptyWhenCopied:
    """A mapping without arguments, whose copies and pickles begin empty."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return type(self)()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class BlockMerge(NamedTuple):
    """What a block merges in its running call, with the settings of the step.

    If it ``merges``, its input has ``images`` of ``tokens``, padding included. The plan is None on a
    correction step, which measures what merging would lose.
    """

    settings: MergeSettings
    merges: bool = False
    images: int = 0
    tokens: int = 0
    plan: Plan | None = None


class RecordedMerges(EmptyWhenCopied, WeakIdKeyDictionary):
    """What calls merged, by the block's input tensor, as long as the tensor is alive."""
