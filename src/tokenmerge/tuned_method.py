"""The default method with what ``tokenmerge tune`` measured on the model.

It corrects the estimates of generations of the kind that was measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tokenmerge.config import EstimateErrors, FoundFor, Tuned
from tokenmerge.default_method import DefaultMethod
from tokenmerge.models.base import Host
from tokenmerge.models.weights import fingerprint
from tokenmerge.plans import RunFacts
from tokenmerge.plans.choose import SpeedupPlan
from tokenmerge.plans.tolerance import Tolerance, fastest_close_plan


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TunedMethod(DefaultMethod):
    """The default method with what ``tokenmerge tune`` measured on the model.

    Its ``facts`` are those of the generations that were measured.
    """

    errors: EstimateErrors  # how far the estimates were off
    found_for: FoundFor
    model: str  # class of the pipeline's denoiser
    weights: str | None  # their fingerprint when the method was made, or None if they cannot be read
    pipe: (
        Any  # its scheduler is read when a generation begins, or None in a copy, which compares no scheduler
    )

    @classmethod
    def of_tuned(
        cls,
        pipe: object,
        hosts: Sequence[Host],
        tuned: Tuned,
        speedup: float | None = None,
        min_psnr: float | None = None,
    ) -> TunedMethod:
        """Return the method for a pipeline. A ``speedup`` takes the place of that in the file."""
        denoiser = next((host for host in hosts if not host.controlnet), hosts[0])
        default = DefaultMethod.of(pipe, hosts, tuned.speedup if speedup is None else speedup, min_psnr)
        found_for = tuned.found_for
        grid = denoiser.grid_at(found_for.height, found_for.width)
        return cls(
            default.speedup,
            dataclasses.replace(default.facts, grid=grid, steps=found_for.steps),
            min_psnr=min_psnr,
            errors=tuned.errors,
            found_for=found_for,
            model=type(denoiser.root).__name__,
            weights=fingerprint(denoiser.root),
            pipe=pipe,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "pipe": None}

    def differences(self, facts: RunFacts) -> list[str]:
        """Return how a generation differs from those that were measured. What is unknown is not compared."""
        scheduler = None if self.pipe is None else type(self.pipe.scheduler).__name__
        differences = self.found_for.differences(
            self.model, None, facts.steps, scheduler, facts.guidance, self.weights
        )
        if facts.grid != self.facts.grid:
            scale = self.found_for.height // self.facts.grid[1]
            size = facts.grid[1] * scale, facts.grid[2] * scale
            differences += self.found_for.differences(size=size) or ["another number of frames"]
        return differences

    def learned(self, facts: RunFacts) -> EstimateErrors | None:
        """Return how far estimates are off, or None for generations of another kind."""
        return None if self.differences(facts) else self.errors

    def plan(self, facts: RunFacts) -> SpeedupPlan:
        """Return the plan of one generation, before ``change``.

        With ``min_psnr``, it is the fastest one that is expected to keep it.
        """
        learned = self.learned(facts)
        if self.min_psnr is None or learned is None:
            return super().plan(facts)
        return fastest_close_plan(facts, self.speedup, self.min_psnr, learned)

    def tolerance(self, facts: RunFacts) -> Tolerance | None:
        """Return the object that changes the settings while an image is drawn, or None if the plan stays.

        It stays where the model was measured: what was learned of whole plans does not hold for parts of
        several ones. On a bundled model, more than half of the images that were drawn by such parts missed
        the tolerance (docs/tried-and-removed.md).
        """
        return super().tolerance(facts) if self.learned(facts) is None else None

    def shortfall(self, facts: RunFacts, closeness: bool = True) -> str:
        """Return a warning if the generation is of another kind, or misses its speed-up or its closeness."""
        told = super().shortfall(facts, closeness)
        differences = self.differences(facts)
        other_kind = self.found_for.warning(differences) if differences else ""
        return "; ".join(filter(None, (other_kind, told)))
