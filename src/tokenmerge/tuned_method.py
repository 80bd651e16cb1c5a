"""What ``tokenmerge tune`` found for one kind of generation; in others, the default method runs instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tokenmerge.config import SavedSettings
from tokenmerge.default_method import DefaultMethod
from tokenmerge.models.base import GridShape, Host
from tokenmerge.plans import Plan

__all__ = ["TunedMethod"]


@dataclasses.dataclass(frozen=True, eq=False)
class TunedMethod(DefaultMethod):
    """The default method with a plan that a search found.

    Attributes:
        saved: the plan, with the speed-up and the kind of generation that it was found for.
        pipe: the pipeline, whose scheduler is read when a generation begins; None: no solver is compared. A
            copy of the model has none.
        model: class of its denoiser.
        found_at: (frames, rows, columns) of the finest token grid that the plan was found for.
    """

    saved: SavedSettings | None = None
    pipe: Any = None
    model: str = ""
    found_at: GridShape | None = None

    @classmethod
    def of_saved(cls, pipe: object, hosts: Sequence[Host], saved: SavedSettings) -> TunedMethod:
        """Return the method for a plan of ``tokenmerge tune`` and the models of a pipeline."""
        assert saved.speedup is not None
        assert saved.found_for is not None
        plain = DefaultMethod.of(pipe, hosts, saved.speedup)
        denoiser = next((host for host in hosts if not host.controlnet), hosts[0])
        own = {field.name: getattr(plain, field.name) for field in dataclasses.fields(DefaultMethod)}
        grid = denoiser.grid_at(saved.found_for.height, saved.found_for.width)
        return cls(**own, saved=saved, pipe=pipe, model=type(denoiser.root).__name__, found_at=grid)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "pipe": None}

    def differences(
        self, grid: GridShape | None = None, steps: int | None = None, guidance: float | None = None
    ) -> list[str]:
        """Return how a generation differs from those that the plan was found for.

        The arguments are those of :meth:`settings`. What is None is not compared.
        """
        assert self.saved is not None
        assert self.saved.found_for is not None
        found = self.saved.found_for
        solver = None if self.pipe is None else type(self.pipe.scheduler).__name__
        differences = found.differences(self.model, None, steps, solver, guidance)
        if grid not in (None, self.found_at):
            assert grid is not None
            scale = found.height // self.found_at[1] if self.found_at else 1
            size = grid[1] * scale, grid[2] * scale
            differences += found.differences(size=size) or ["another number of frames"]
        return differences

    def plan(
        self,
        grid: GridShape | None = None,
        steps: int | None = None,
        guidance: float | None = None,
        ends_clean: bool = False,
    ) -> Plan:
        """Return the plan of one generation, without changes; the arguments are those of :meth:`settings`."""
        rule = super().plan(grid, steps, guidance, ends_clean)
        assert self.saved is not None
        if self.differences(grid, steps, guidance):
            return rule
        return dataclasses.replace(rule, config=self.saved.config)

    def shortfall(
        self, grid: GridShape | None = None, steps: int | None = None, guidance: float | None = None
    ) -> str:
        """Return how the generation differs from those of the plan, or what the rule does not reach."""
        assert self.saved is not None
        assert self.saved.found_for is not None
        if differences := self.differences(grid, steps, guidance):
            return self.saved.found_for.warning(differences, self.speedup)
        return ""
