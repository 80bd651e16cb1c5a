"""The default method with a plan that ``tokenmerge tune`` found.

The plan holds in generations of the kind that it was found for. In others, the default method chooses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tokenmerge.config import FoundFor, SavedSettings, ToMeConfig
from tokenmerge.default_method import DefaultMethod
from tokenmerge.models.base import Host
from tokenmerge.plans import RunFacts
from tokenmerge.plans.choose import SpeedupPlan


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TunedMethod(DefaultMethod):
    """The default method with a plan that ``tokenmerge tune`` found. Its ``facts`` are those of the plan."""

    found: ToMeConfig  # the settings of the plan
    found_for: FoundFor
    model: str  # class of the pipeline's denoiser
    # Its scheduler is read when a generation begins. A copy has None, and compares no scheduler.
    pipe: Any

    @classmethod
    def of_saved(cls, pipe: object, hosts: Sequence[Host], saved: SavedSettings) -> TunedMethod:
        """Return the method for a plan of ``tokenmerge tune`` and the models of a pipeline."""
        assert saved.speedup is not None
        assert saved.found_for is not None
        denoiser = next((host for host in hosts if not host.controlnet), hosts[0])
        default = DefaultMethod.of(pipe, hosts, saved.speedup)
        found_for = saved.found_for
        grid = denoiser.grid_at(found_for.height, found_for.width)
        facts = dataclasses.replace(default.facts, grid=grid, steps=found_for.steps)
        model = type(denoiser.root).__name__
        return cls(default.speedup, facts, found=saved.config, found_for=found_for, model=model, pipe=pipe)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "pipe": None}

    def differences(self, facts: RunFacts) -> list[str]:
        """Return how a generation differs from those of the plan. Unknown guidance is not compared."""
        scheduler = None if self.pipe is None else type(self.pipe.scheduler).__name__
        differences = self.found_for.differences(self.model, None, facts.steps, scheduler, facts.guidance)
        if facts.grid != self.facts.grid:
            scale = self.found_for.height // self.facts.grid[1]
            size = facts.grid[1] * scale, facts.grid[2] * scale
            differences += self.found_for.differences(size=size) or ["another number of frames"]
        return differences

    def plan(self, facts: RunFacts) -> SpeedupPlan:
        """Return the plan that was found, or that of the default method in another kind of generation."""
        plan = super().plan(facts)
        return plan if self.differences(facts) else dataclasses.replace(plan, config=self.found)

    def shortfall(self, facts: RunFacts, closeness: bool = True) -> str:
        """Return a warning if the generation differs from those of the plan, or an empty string."""
        differences = self.differences(facts)
        return self.found_for.warning(differences, self.speedup) if differences else ""
