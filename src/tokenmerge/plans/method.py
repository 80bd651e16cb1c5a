"""What chooses the settings of each generation, as the runtime and the reports see it."""

from __future__ import annotations

from typing import Protocol

from tokenmerge.config import EstimateErrors, ToMeConfig
from tokenmerge.models.base import GridShape
from tokenmerge.plans.choose import SpeedupPlan
from tokenmerge.plans.estimate import Estimate, Observations
from tokenmerge.plans.facts import RunFacts, Schedule
from tokenmerge.plans.tolerance import Tolerance


class Method(Protocol):
    """A method that chooses the settings of each generation, such as the default method."""

    @property
    def speedup(self) -> float:
        """The wanted speed-up, ≥ 1."""

    @property
    def min_psnr(self) -> float | None:
        """The lowest PSNR to the dense image in dB, or None if the speed-up alone decides."""

    @property
    def facts(self) -> RunFacts:
        """Facts about the model, for its default size and number of steps."""

    def facts_at(
        self,
        grid: GridShape | None = None,
        steps: int | None = None,
        guidance: float | None = None,
        schedule: Schedule | None = None,
    ) -> RunFacts:
        """Return the facts about one generation. Arguments that are left out are those of :attr:`facts`."""

    def settings(self, facts: RunFacts) -> ToMeConfig:
        """Return the settings of one generation, or those that it begins with."""

    def settings_without_tolerance(self, facts: RunFacts) -> ToMeConfig:
        """Return the settings that the speed-up alone asks for."""

    def tolerance(self, facts: RunFacts) -> Tolerance | None:
        """Return what changes the settings of a generation while it runs, or None without a tolerance."""

    def plan(self, facts: RunFacts) -> SpeedupPlan:
        """Return the plan of one generation."""

    def learned(self, facts: RunFacts) -> EstimateErrors | None:
        """Return how far estimates of a generation are off, or None if it was not measured on this model."""

    def expected(self, facts: RunFacts) -> Estimate:
        """Return how close an image is expected to be before its run."""

    def estimate(self, facts: RunFacts, config: ToMeConfig, observed: Observations) -> Estimate | None:
        """Estimate how close an image is by what its run has shown, or return None if that is not finite."""

    def is_dense(self, facts: RunFacts) -> bool:
        """Return whether a generation begins with settings that merge and skip nothing."""

    def shortfall(self, facts: RunFacts, closeness: bool = True) -> str:
        """Return a warning if a generation misses the speed-up or the closeness, or an empty string."""
