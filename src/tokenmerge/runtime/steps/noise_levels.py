"""The noise levels of a generation, from its scheduler, and whether a scheduler clips predicted images."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import weakref
from collections.abc import MutableMapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tokenmerge.runtime.steps.scheduler import DenoisingStep, generation_of, is_flow, setting_of

_PROBED_STEPS = 10  # of a scheduler that is asked how it clips
_MORE = 1.5  # by which the change differs where the image is clipped
_CLIPPED = 100.0  # an output of a model whose image is clipped
_CHANGE = 0.1  # a small change of the output
_CLIPS: MutableMapping[Any, bool] = weakref.WeakKeyDictionary()  # schedulers, by ``clips_pictures_alone``
_MOST = 1e4  # the noise level of a sample that is noise alone


@dataclasses.dataclass(frozen=True)
class NoiseLevels:
    """The noise levels of one generation."""

    # Noise of each step of the scheduler, divided by the share of the image, and that after the last step.
    sigmas: tuple[float, ...]
    predicts: str  # "epsilon", "v_prediction", "sample" or, of flow matching, "flow"
    clips: bool = False  # see ``clips_pictures_alone``

    def scaled(self, sample: Tensor, index: int) -> Tensor:
        """Return the image plus noise of this level, from the sample that a model gets: float32."""
        sigma = self.sigmas[index]
        return sample.float() * (1 + sigma if self.predicts == "flow" else (1 + sigma**2) ** 0.5)

    def _shares(self, index: int) -> tuple[float, float]:
        """Return how much of the sample and of the model's output is in the image that it predicts."""
        sigma = self.sigmas[index]
        root = (1 + sigma**2) ** 0.5
        return {
            "sample": (0.0, 1.0),
            "epsilon": (root, -sigma),
            "v_prediction": (1 / root, -sigma / root),
            "flow": (1.0, -sigma / (1 + sigma)),
        }[self.predicts]

    def weight(self, index: int) -> float:
        """Return how much an error of the model's output at a step changes the image that it predicts."""
        return abs(self._shares(index)[1])

    def picture(self, sample: Tensor, output: Tensor, index: int) -> Tensor:
        """Return the image that a model predicts with an output, as guidance combines it: float32."""
        of_sample, of_output = self._shares(index)
        return torch.add(sample.float() * of_sample, output, alpha=of_output).float()


def noise_levels(scheduler: Any, step: DenoisingStep) -> NoiseLevels | None:
    """Return the noise levels of a generation, or None if they are unknown. The device is not waited for."""
    if generation_of(scheduler) is not step.generation or setting_of(scheduler, "sigma_data"):
        return None
    if step.by_frames:  # each frame has a level of its own
        return None
    predicts = setting_of(scheduler, "prediction_type", "epsilon")
    levels = _sigmas(scheduler, step.total)
    if is_flow(scheduler) or predicts == "flow_prediction":
        predicts = "flow"
        levels = [min(level / max(1 - level, 1 / _MOST), _MOST) for level in levels]
    known = predicts in ("epsilon", "v_prediction", "sample", "flow")
    rises = any(later > before for before, later in pairwise(levels))
    if not levels or not known or rises:
        return None
    return NoiseLevels(tuple(levels), predicts, clips_pictures_alone(scheduler))


def _sigmas(scheduler: Any, total: int) -> list[float]:
    """Return the levels in the scheduler's own unit, or else those of its timesteps.

    The list is empty if they are unknown.
    """
    sigmas = getattr(scheduler, "sigmas", None)
    if isinstance(sigmas, Tensor) and sigmas.device.type == "cpu" and len(sigmas) == total + 1:
        return sigmas.tolist()
    kept = getattr(scheduler, "alphas_cumprod", None)
    if not isinstance(kept, Tensor) or kept.device.type != "cpu":
        return []
    timesteps = scheduler.timesteps
    if timesteps.device.type == "cpu":
        places = timesteps.long().clamp(0, len(kept) - 1)
    else:  # reading them would wait for the device: they are about evenly spaced
        places = torch.linspace(len(kept) * (1 - 1 / total), 0, total).long()
    shares = kept[places].double().clamp(min=_MOST**-2)
    return [*((1 - shares) / shares).sqrt().tolist(), 0.0]


def clips_pictures_alone(scheduler: Any) -> bool:
    """Return whether a scheduler clips the image that is predicted in a step, and not the noise.

    DDIM does so with ``clip_sample`` or ``thresholding``. What a model errs in its output changes the
    predicted image and the predicted noise in opposite directions. Where the image is clipped, all of the
    change of the noise stays. Other schedulers make the noise from the clipped image, so that nothing of it
    stays.
    """
    if not (setting_of(scheduler, "clip_sample") or setting_of(scheduler, "thresholding")):
        return False
    with contextlib.suppress(KeyError, TypeError):
        return _CLIPS[scheduler]
    clips = _keeps_noise(scheduler)
    with contextlib.suppress(TypeError):  # without a hash
        _CLIPS[scheduler] = clips
    return clips


def _keeps_noise(scheduler: Any) -> bool:
    """Return whether a change of the model's output changes a step more where the image is clipped."""
    changes = []
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            for output in (0.0, _CLIPPED):
                made = []
                for change in (0.0, _CHANGE):
                    copied = type(scheduler).from_config(scheduler.config)
                    copied.set_timesteps(_PROBED_STEPS)
                    draws = "generator" in inspect.signature(copied.step).parameters
                    given = {"generator": torch.Generator().manual_seed(0)} if draws else {}
                    zeros = torch.zeros(1, 1, 1, 1)
                    step = copied.timesteps[_PROBED_STEPS // 2]
                    made.append(copied.step(zeros + output + change, step, zeros, **given)[0])
                changes.append(abs(float(made[1] - made[0])))
    except Exception:  # no scheduler of diffusers, or one whose steps need more
        return False
    return changes[1] > _MORE * changes[0]
