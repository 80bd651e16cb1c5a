"""The default method: settings for a wanted speed-up, chosen when each generation begins."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from tokenmerge.calibration import TimedMerging, fewest_tokens
from tokenmerge.config import Correction, EstimateErrors, MergeSharing, Rule, StepReuse, ToMeConfig
from tokenmerge.config.checks import at_least_1, check_counts, check_fields, number, optional
from tokenmerge.config.origin import DEFAULT
from tokenmerge.errors import ConfigError
from tokenmerge.models.base import GridShape, Host
from tokenmerge.models.find import find_hosts
from tokenmerge.models.fused import is_fused, splits_attention
from tokenmerge.models.placement import device_of, dtype_of, narrowest_attention
from tokenmerge.plans import ROUNDING, Estimate, RunFacts, Schedule, facts_of, plan_for, speedup_of
from tokenmerge.plans.choose import SpeedupPlan, fewest_that_merge, scopes_of
from tokenmerge.plans.estimate import Observations, estimate_closeness, expected, looks, psnr_of
from tokenmerge.plans.learned import corrected
from tokenmerge.plans.tolerance import Tolerance
from tokenmerge.runtime.memory.state import warn_caller
from tokenmerge.runtime.steps.pipeline import default_guidance, default_steps
from tokenmerge.runtime.steps.scheduler import next_schedule

__all__ = ["DefaultMethod", "default_guidance", "default_steps", "settings_for"]

# A plan that misses the wanted speed-up by 1 % is not worth a warning. No record decides this: it was chosen.
_ENOUGH = 0.99
_STEPS = 20  # of a generation whose number of steps is unknown
_SIDE = 64  # of latents whose size is unknown
Change = Callable[[ToMeConfig], ToMeConfig]
check_min_psnr = optional(number("a PSNR in dB from 1 to 100, such as 30", lambda value: 1 <= value <= 100))


def _unchanged(config: ToMeConfig) -> ToMeConfig:
    return config


@dataclasses.dataclass(frozen=True, eq=False)
class DefaultMethod:
    """The default method for one pipeline or model.

    Raises:
        ConfigError: a number is out of its range.
    """

    speedup: float  # dense operations divided by those of the generation, ≥ 1
    facts: RunFacts  # about the model, for the default size and number of steps
    change: Change = _unchanged  # changes the settings after these were chosen
    # Lowest PSNR to the dense image in dB, > 0, or None if the speed-up alone decides.
    min_psnr: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, "", {"speedup": at_least_1, "min_psnr": check_min_psnr})

    @classmethod
    def of(
        cls,
        pipe_or_model: object,
        hosts: Sequence[Host],
        speedup: float,
        min_psnr: float | None = None,
        follows_steps: bool | None = None,
    ) -> DefaultMethod:
        """Return the default method for models that were found in a pipeline or a model.

        ``follows_steps`` is that of :class:`tokenmerge.plans.RunFacts`. If it is None, only a pipeline does.
        """
        check_min_psnr("min_psnr", min_psnr)
        denoiser = next((host for host in hosts if not host.controlnet), hosts[0])
        attention = narrowest_attention([block for host in hosts for block in host.blocks])
        if follows_steps is None:
            follows_steps = getattr(pipe_or_model, "scheduler", None) is not None
        steps = default_steps(pipe_or_model) or _STEPS
        facts = facts_of(
            denoiser,
            denoiser.grid_at(*(denoiser.sample_size or (_SIDE, _SIDE))),
            steps,
            guidance=default_guidance(pipe_or_model),
            schedule=next_schedule(pipe_or_model, steps),
            follows_steps=follows_steps,
            proportional=allows_proportional(pipe_or_model, hosts),
        )
        device = device_of(pipe_or_model, denoiser.root)
        dtype = dtype_of(denoiser.root)
        shared = attention if follows_steps else attention[:2]
        merging = [
            TimedMerging(device, dtype, scope, False, denoiser.usual_batch, *shared)
            for scope in scopes_of(facts)
        ]
        facts = dataclasses.replace(facts, fewest_tokens=fewest_tokens(*merging))
        if min_psnr is not None and not follows_steps:
            raise ConfigError(
                f"min_psnr: a model alone does not know its denoising steps, got {min_psnr:g}; apply token "
                "merging to the pipeline"
            )
        return cls(speedup, facts, min_psnr=min_psnr)

    def facts_at(
        self,
        grid: GridShape | None = None,
        steps: int | None = None,
        guidance: float | None = None,
        schedule: Schedule | None = None,
    ) -> RunFacts:
        """Return the facts about one generation, as in :class:`tokenmerge.plans.RunFacts`.

        Arguments that are left out are those of :attr:`facts`. Without ``guidance``, its scale is unknown.
        """
        given: dict[str, Any] = {"grid": grid, "steps": steps, "schedule": schedule}
        known = {name: value for name, value in given.items() if value is not None}
        return dataclasses.replace(self.facts, **known, guidance=guidance)

    def settings(self, facts: RunFacts) -> ToMeConfig:
        """Return the settings of one generation, or those that it begins with."""
        tolerance = self.tolerance(facts)
        return self.settings_without_tolerance(facts) if tolerance is None else tolerance.config

    def settings_without_tolerance(self, facts: RunFacts) -> ToMeConfig:
        """Return the settings that the speed-up alone asks for."""
        return self.change(self.plan(facts).config)

    def tolerance(self, facts: RunFacts) -> Tolerance | None:
        """Return the object that changes the settings of a generation while it runs, or None without one."""
        if self.min_psnr is None or self.speedup == 1:  # a speed-up of 1 is dense in any case
            return None
        return Tolerance(facts, self.speedup, self.min_psnr, self.change)

    def learned(self, facts: RunFacts) -> EstimateErrors | None:
        """Return how far estimates of a generation are off, or None if it was not measured on this model."""
        return None

    def expected(self, facts: RunFacts, plan: SpeedupPlan | None = None) -> Estimate:
        """Return how close an image is expected to be before its run. The plan is that for ``facts``."""
        plan = plan or self.plan(facts)
        learned = self.learned(facts)
        if learned is None:
            return expected(plan.expected_error)
        return corrected(learned, psnr_of(plan.expected_error), plan.speedup, after=False)

    def estimate(self, facts: RunFacts, config: ToMeConfig, observed: Observations) -> Estimate | None:
        """Estimate how close an image is by what its run has shown, or return None if that is not finite."""
        found = estimate_closeness(facts, config, observed)
        learned = self.learned(facts)
        if found is None or learned is None:
            return found
        return corrected(learned, found.psnr, speedup_of(facts, config), after=True)

    def plan(self, facts: RunFacts) -> SpeedupPlan:
        """Return the plan of one generation, before ``change``."""
        return plan_for(facts, self.speedup)

    def is_dense(self, facts: RunFacts) -> bool:
        """Return whether a generation begins with settings that merge and skip nothing."""
        config = self.settings(facts)
        return not (config.merges or config.reuse.on)

    def shortfall(self, facts: RunFacts, closeness: bool = True) -> str:
        """Return a warning if the generation misses the speed-up or the closeness, or an empty string."""
        if self.min_psnr is not None and self.is_dense(facts):
            return f"min_psnr={self.min_psnr:g}: no plan is so close, so this generation is dense; lower it"
        return self.missed(facts, closeness)

    def missed(self, facts: RunFacts, closeness: bool = True, under: str = "") -> str:
        """Return a warning if the plan misses the speed-up or is far from dense, or an empty string.

        With ``closeness``, it also says how close the image is expected to be. ``under`` names the
        conditions of the generation, such as ``", with the pipeline's defaults"``.
        """
        asked = f"speedup={self.speedup:g}{under}"
        fastest = plan_for(facts, math.inf)
        if fastest.speedup >= _ENOUGH * self.speedup:
            near = self.expected(facts)
            differs = looks(near.psnr) == looks(0) and facts.follows_steps
            differs = differs and self.min_psnr is None
            if not differs or not closeness:
                return ""
            return f"{asked}: closeness to dense before the run: {near}; take a lower speed-up, or more steps"
        where = f"in {facts.steps} step{'s' if facts.steps > 1 else ''}"
        if facts.work.levels:
            where += f" on {_size(facts.grid)} tokens"
        if fastest.speedup < 1 + ROUNDING:
            return (
                f"{asked}: nothing can be saved {where}, so this generation is dense; take more steps or a "
                "larger image"
            )
        told = (
            f"{asked}: at most {fastest.speedup:.2f}× can be reached {where}; take more steps or a larger "
            "image, or a lower speed-up"
        )
        if not closeness:
            return told
        return f"{told}. Closeness to dense before the run: {self.expected(facts, fastest)}"

    @property
    def name(self) -> str:
        """Its name in texts, such as ``"speedup=2"`` or ``"speedup=3, min_psnr=35"``."""
        tolerance = "" if self.min_psnr is None else f", min_psnr={self.min_psnr:g}"
        return f"{DEFAULT}={self.speedup:g}{tolerance}"

    @property
    def widest(self) -> ToMeConfig:
        """Settings that merge and skip wherever those of some generation do, for patching."""
        plain = self.settings(self.facts)
        if not self.facts.follows_steps or self.speedup == 1:
            return plain
        skips = self.facts.can_skip
        return dataclasses.replace(
            plain,
            ratio=0.5 if self.facts.work.levels else 0.0,
            min_tokens=min(plain.min_tokens, fewest_that_merge(self.facts)),
            scope="layers",
            proportional=self.facts.proportional,
            merge_sharing=MergeSharing(blocks=True),
            correction=Correction(every=2),
            reuse=StepReuse(every=2, shallow_every=2) if skips else StepReuse(),
            rules=(Rule(start=0.5, changes={"scope": "block"}),) if self.facts.whole_blocks else (),
        )


def _size(grid: GridShape) -> str:
    """Return the size of a token grid as text: rows and columns, after the frames if there are several."""
    frames, rows, columns = grid
    return f"{rows} × {columns}" if frames == 1 else f"{frames} × {rows} × {columns}"


def settings_for(
    pipe_or_model: object,
    speedup: float = 2.0,
    height: int | None = None,
    width: int | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    follows_steps: bool | None = None,
) -> ToMeConfig:
    """Return the settings that the default method chooses for a generation.

    Args:
        pipe_or_model: as for :func:`tokenmerge.apply_token_merging`. It must be on the device that it will
            run on, or be offloaded from it, because merging is timed there.
        speedup: dense operations divided by those of the generation, ≥ 1. Raising it
            makes the image less like the dense one.
        height: height of the latents, or None for the model's default size.
        width: width of the latents, or None for the model's default size.
        steps: denoising steps of the generation, ≥ 1, or None for the pipeline's default.
        guidance: scale of classifier-free guidance, or None for the pipeline's default.
        follows_steps: whether settings may change over the denoising steps, or None if only in a pipeline.

    It warns if the generation cannot reach the speed-up.

    Raises:
        UnsupportedModelError: the object neither is nor contains a supported model.
        ConfigError: a number is out of its range.
    """
    check_counts(height=height, width=width, steps=steps)
    hosts = find_hosts(pipe_or_model)
    method = DefaultMethod.of(pipe_or_model, hosts, speedup, follows_steps=follows_steps)
    denoiser = next((host for host in hosts if not host.controlnet), hosts[0])
    grid = None if height is None or width is None else denoiser.grid_at(height, width)
    known = method.facts_at(grid, steps, method.facts.guidance if guidance is None else guidance)
    told = method.shortfall(known)
    if told:
        warn_caller(told)
    return method.settings(known)


def allows_proportional(pipe_or_model: object, hosts: Sequence[Host]) -> bool:
    """Return whether proportional attention is possible in every block, with its present processor."""
    blocks = (block for host in hosts for block in host.blocks)
    layers = ((getattr(block.module, layer.name), layer) for block in blocks for layer in block.layers)
    attention = (module for module, layer in layers if layer.kind == "attn1" and layer.own_keys)
    return not splits_attention(pipe_or_model) and all(map(is_fused, attention))
