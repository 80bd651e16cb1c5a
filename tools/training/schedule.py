"""The phases of a training run: image size, batch and learning rate as a function of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokenmerge import ToMeConfig

WARM_UP = 100  # steps from a learning rate of zero, once, at the start of the run


@dataclass(frozen=True)
class Phase:
    """A stretch of the run; the rate goes linearly from `rate` to `final_rate`.

    Images are of the given sizes in turn, one size a step, so that none is forgotten. With `merging`,
    tokens merge in training too; a dense phase that follows makes up for what the model loses by it.
    """

    sizes: tuple[int, ...]
    batch: int
    steps: int
    rate: float
    final_rate: float
    merging: ToMeConfig | None = None


def stretch(phases: Sequence[Phase], length: float) -> list[Phase]:
    """Multiply the steps of every phase, for a machine that can afford more of them.

    >>> [phase.steps for phase in stretch([Phase((64,), 32, 900, 2e-3, 1e-3)], 1.5)]
    [1350]
    """
    return [replace(phase, steps=round(phase.steps * length)) for phase in phases]


def total_steps(phases: Sequence[Phase]) -> int:
    """Count the steps of a whole run."""
    return sum(phase.steps for phase in phases)


def at_step(phases: Sequence[Phase], step: int) -> tuple[Phase, float]:
    """Return the phase that a step belongs to, and its learning rate."""
    start = 0
    for phase in phases:
        if step < start + phase.steps:
            progress = (step - start) / phase.steps
            rate = phase.rate + (phase.final_rate - phase.rate) * progress
            return phase, rate * min(1.0, (step + 1) / WARM_UP)
        start += phase.steps
    raise ValueError(f"step {step} is past the end of a run of {start} steps")
