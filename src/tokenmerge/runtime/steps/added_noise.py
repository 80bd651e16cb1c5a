"""Learns how much noise each step of a scheduler adds, from a copy of it that steps on zeros.

The steps of a scheduler are linear in the sample and in what the model returned. Of zeros they make the noise
alone.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor

from tokenmerge.runtime.steps.scheduler import DenoisingStep, adds_noise, is_midway, setting_of

_SHAPE = (1, 1, 61, 67)  # of the zeros: 4,087 values, whose deviation is good to about a hundredth
_NOT_LINEAR = ("clip_sample", "thresholding")  # settings with which a step is not linear


def noise_before(step: DenoisingStep, scheduler: Any, timestep: Tensor | float) -> float | None:
    """Return the deviation of the noise that the step before a step has added; None: it is unknown.

    It is in the unit of the sample that the model is given. A copy of the scheduler is asked once, as the
    generation begins. Where :meth:`Patch.at_step` tells the step, the scheduler may be at another one.
    """
    generation = step.generation
    if not (generation.schedule.adds_noise or adds_noise(scheduler)):
        return 0.0
    if generation.added_noise is None:
        generation.added_noise = tuple(_added_noise(scheduler, timestep, generation.first))
    return dict(enumerate(generation.added_noise, generation.first)).get(step.index)


def _added_noise(scheduler: Any, timestep: Tensor | float, first: int) -> list[float | None]:
    """Return the deviation of the noise in the sample of each step from the first on, where it is known."""
    if any(setting_of(scheduler, name) for name in _NOT_LINEAR):
        return []
    try:
        # A loop may give a step another ``eta`` than that which is taken by itself.
        takes = inspect.signature(scheduler.step).parameters
        if "generator" not in takes or "eta" in takes or scheduler.timesteps.device.type != "cpu":
            return []
        counts = getattr(scheduler, "step_index", None) is not None
        if counts and is_midway(scheduler, timestep):  # it holds what the model returned
            return []
        with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
            return _of_zeros(copy.deepcopy(scheduler), first)
    except Exception:  # no scheduler of diffusers, or one whose steps need more
        return []


def _of_zeros(scheduler: Any, first: int) -> list[float | None]:
    """Return the deviation of what each step but the first is given, if the step before is taken on zeros."""
    generator = torch.Generator().manual_seed(0)
    zeros = torch.zeros(_SHAPE)
    scale = getattr(scheduler, "scale_model_input", lambda sample, _: sample)
    found: list[float | None] = []
    made: Tensor | None = None
    for timestep in scheduler.timesteps[first:]:
        # As pipelines do before each step; a scheduler may find out its step there.
        given = scale(zeros if made is None else made, timestep)
        found.append(None if made is None else float(given.std()))
        made = scheduler.step(zeros, timestep, zeros, generator=generator)[0]
    return found
