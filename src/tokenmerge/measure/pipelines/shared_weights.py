"""Two pipelines on one set of weights: one to patch, one to leave dense."""

from __future__ import annotations

import copy
from itertools import chain
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

__all__ = ["denoising_models", "twin"]

_DENOISING = ("unet", "transformer", "controlnet")


def twin(pipe: DiffusionPipeline) -> DiffusionPipeline:
    """A second pipeline whose denoiser and ControlNets are modules of their own with the same weights.

    Patching or compiling one leaves the other as it is, so both can be run in turns without undoing and
    redoing either. The weights are shared, not copied, and so is every other component.
    """
    other = copy.copy(pipe)
    for name, model in denoising_models(pipe).items():
        shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
        setattr(other, name, copy.deepcopy(model, shared))
    return other


def denoising_models(pipe: DiffusionPipeline) -> dict[str, nn.Module]:
    """The models that run at each denoising step, by the name of the component."""
    found = {name: getattr(pipe, name, None) for name in _DENOISING}
    return {name: model for name, model in found.items() if isinstance(model, nn.Module)}
