"""What ``tokenmerge tune`` found for one kind of generation; in others, the default method runs instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tokenmerge.config import FoundFor, SavedSettings, ToMeConfig
from tokenmerge.default_method import DefaultMethod
from tokenmerge.models.base import GridShape, Host
from tokenmerge.plans import Plan

__all__ = ["TunedMethod"]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TunedMethod(DefaultMethod):
    """The default method with a plan that a search found.

    Attributes:
        found: settings of the plan.
        found_for: the kind of generation that it was found for.
        found_at: (frames, rows, columns) of the finest token grid there.
        model: class of the pipeline's denoiser.
        pipe: the pipeline, whose scheduler is read when a generation begins. A copy has none, and compares no
            solver.
    """

    found: ToMeConfig
    found_for: FoundFor
    found_at: GridShape
    model: str
    pipe: Any

    @classmethod
    def of_saved(cls, pipe: object, hosts: Sequence[Host], saved: SavedSettings) -> TunedMethod:
        """Return the method for a plan of ``tokenmerge tune`` and the models of a pipeline."""
        assert saved.speedup is not None
        assert saved.found_for is not None
        denoiser = next((host for host in hosts if not host.controlnet), hosts[0])
        return cls(
            **vars(DefaultMethod.of(pipe, hosts, saved.speedup)),
            found=saved.config,
            found_for=saved.found_for,
            found_at=denoiser.grid_at(saved.found_for.height, saved.found_for.width),
            model=type(denoiser.root).__name__,
            pipe=pipe,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "pipe": None}

    def differences(
        self, grid: GridShape | None = None, steps: int | None = None, guidance: float | None = None
    ) -> list[str]:
        """Return how a generation differs from those of the plan. What is None is not compared."""
        solver = None if self.pipe is None else type(self.pipe.scheduler).__name__
        differences = self.found_for.differences(self.model, None, steps, solver, guidance)
        if grid is not None and grid != self.found_at:
            scale = self.found_for.height // self.found_at[1]
            size = grid[1] * scale, grid[2] * scale
            differences += self.found_for.differences(size=size) or ["another number of frames"]
        return differences

    def plan(
        self,
        grid: GridShape | None = None,
        steps: int | None = None,
        guidance: float | None = None,
        ends_clean: bool = False,
    ) -> Plan:
        """Return the plan that was found, or that of the default method in another kind of generation."""
        plan = super().plan(grid, steps, guidance, ends_clean)
        if self.differences(grid, steps, guidance):
            return plan
        return dataclasses.replace(plan, config=self.found)

    def shortfall(
        self, grid: GridShape | None = None, steps: int | None = None, guidance: float | None = None
    ) -> str:
        """Return how the generation differs from those of the plan; empty: it does not."""
        differences = self.differences(grid, steps, guidance)
        return self.found_for.warning(differences, self.speedup) if differences else ""
