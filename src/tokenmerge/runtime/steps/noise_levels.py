"""The noise levels of a scheduler of diffusers, and the picture that a model predicts at each of them."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tokenmerge.runtime.steps.scheduler import DenoisingStep, generation_of, is_flow

_MOST = 1e4  # of a sample that is noise alone


@dataclasses.dataclass(frozen=True)
class NoiseLevels:
    """The noise levels of one generation.

    Attributes:
        sigmas: noise of each step of the scheduler, divided by the share of the picture, and that after the
            last step.
        predicts: ``"epsilon"``, ``"v_prediction"``, ``"sample"`` or, of flow matching, ``"flow"``.
    """

    sigmas: tuple[float, ...]
    predicts: str

    def scaled(self, sample: Tensor, index: int) -> Tensor:
        """Return the picture plus noise of this level, from the sample that a model gets: float32."""
        sigma = self.sigmas[index]
        return sample.float() * (1 + sigma if self.predicts == "flow" else (1 + sigma**2) ** 0.5)

    def weight(self, index: int) -> float:
        """Return how much an error of the model's output at a step changes the picture that it predicts."""
        sigma = self.sigmas[index]
        return {
            "sample": 1.0,
            "epsilon": sigma,
            "v_prediction": sigma / (1 + sigma**2) ** 0.5,
            "flow": sigma / (1 + sigma),
        }[self.predicts]

    def picture(self, sample: Tensor, output: Tensor, index: int) -> Tensor:
        """Return the picture that a model predicts at a step: float32, in the shape of the sample.

        The ``output`` is that of the model, as guidance combines it.
        """
        if self.predicts == "sample":
            return output.float()
        if self.predicts == "flow":
            return torch.add(sample.float(), output, alpha=-self.weight(index))
        scale = (1 + self.sigmas[index] ** 2) ** (-0.5 if self.predicts == "v_prediction" else 0.5)
        return torch.add(sample.float() * scale, output, alpha=-self.weight(index))

    def lowers(self, index: int) -> bool:
        """Return whether there is less noise after a step, which is not the last."""
        before, after = self.sigmas[index : index + 2]
        return 0 < after < before


def noise_levels(scheduler: Any, step: DenoisingStep) -> NoiseLevels | None:
    """Return the noise levels of a generation, without waiting for the device; None: they are unknown."""
    timesteps, config = getattr(scheduler, "timesteps", None), getattr(scheduler, "config", {})
    if generation_of(timesteps) is not step.generation or hasattr(config, "sigma_data"):
        return None
    predicts = "flow" if is_flow(scheduler) else config.get("prediction_type", "epsilon")
    predicts = "flow" if predicts == "flow_prediction" else predicts
    if predicts not in ("epsilon", "v_prediction", "sample", "flow"):
        return None
    levels = _sigmas(scheduler, step.total)
    if levels is not None and predicts == "flow":
        levels = [min(level / max(1 - level, 1 / _MOST), _MOST) for level in levels]
    if levels is None or any(later > before for before, later in pairwise(levels)):
        return None
    return NoiseLevels(tuple(levels), predicts)


def _sigmas(scheduler: Any, total: int) -> list[float] | None:
    """Return the levels in the scheduler's own unit. Without some, they are those of its timesteps."""
    sigmas = getattr(scheduler, "sigmas", None)
    if isinstance(sigmas, Tensor) and sigmas.device.type == "cpu" and len(sigmas) == total + 1:
        return sigmas.tolist()
    kept = getattr(scheduler, "alphas_cumprod", None)
    if not isinstance(kept, Tensor) or kept.device.type != "cpu":
        return None
    timesteps = scheduler.timesteps
    if timesteps.device.type == "cpu":
        places = timesteps.long().clamp(0, len(kept) - 1)
    else:  # reading them would wait for the device: they are about evenly spaced
        places = torch.linspace(len(kept) * (1 - 1 / total), 0, total).long()
    shares = kept[places].double().clamp(min=_MOST**-2)
    return [*((1 - shares) / shares).sqrt().tolist(), 0.0]
