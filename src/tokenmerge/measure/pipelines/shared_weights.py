"""Two pipelines on one set of weights: one to patch, one to leave dense."""

from __future__ import annotations

import copy
from itertools import chain
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

__all__ = ["denoising_models", "shared_copy", "twin"]

_DENOISING = ("unet", "transformer", "controlnet")


def twin(pipe: DiffusionPipeline) -> DiffusionPipeline:
    """A second pipeline whose denoiser and ControlNets are modules of their own with the same weights.

    Patching or compiling one leaves the other as it is, so both can be run in turns without undoing and
    redoing either. The weights are shared, not copied, and so is every other component.
    """
    other = copy.copy(pipe)
    for name, model in denoising_models(pipe).items():
        setattr(other, name, shared_copy(model))
    return other


def shared_copy(model: nn.Module) -> nn.Module:
    """A copy whose modules are its own and whose weights are those of the original."""
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, shared)


def denoising_models(pipe: DiffusionPipeline) -> dict[str, nn.Module]:
    """The models that run at each denoising step, by the name of the component."""
    found = {name: getattr(pipe, name, None) for name in _DENOISING}
    return {name: model for name, model in found.items() if isinstance(model, nn.Module)}
