"""Copies of pipelines and models that share their weights, to patch one and leave the other dense."""

from __future__ import annotations

import copy
from itertools import chain
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_DENOISING = ("unet", "transformer", "controlnet")


def twin(pipe: DiffusionPipeline) -> DiffusionPipeline:
    """Copy a pipeline with the modules of its denoiser and ControlNets, sharing weights and other components.

    Patching or compiling one pipeline does not affect the other, so their calls can be interleaved.
    """
    other = copy.copy(pipe)
    for name, model in denoising_models(pipe).items():
        setattr(other, name, shared_copy(model))
    return other


def shared_copy(model: nn.Module) -> nn.Module:
    """Copy the modules of a model, but share its weights."""
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, shared)


def denoising_models(pipe: DiffusionPipeline) -> dict[str, nn.Module]:
    """The models that run at each denoising step, by the component's name."""
    found = {name: getattr(pipe, name, None) for name in _DENOISING}
    return {name: model for name, model in found.items() if isinstance(model, nn.Module)}
