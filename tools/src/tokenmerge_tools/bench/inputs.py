"""Random inputs for a denoiser that is measured alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from tokenmerge.models.base import is_a
from tokenmerge.models.find import find_hosts
from tokenmerge.models.placement import blank


@dataclasses.dataclass(frozen=True)
class InputSize:
    """The size of one call.

    Height and width are in pixels, with ``scale`` pixels per latent position along each side. ``samples`` is
    the batch size, which guidance doubles. An image has one frame.
    """

    height: int
    width: int
    scale: int
    samples: int
    frames: int

    @property
    def latent(self) -> tuple[int, int]:
        """Height and width of the latents."""
        return self.height // self.scale, self.width // self.scale


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arguments of one call of a denoiser."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def example_inputs(model: nn.Module, size: InputSize, seed: int, guided: bool) -> Inputs:
    """Make inputs for one call, with Gaussian noise for latents and text embeddings.

    If ``guided``, the batch holds every sample twice, as with classifier-free guidance.
    """
    if is_a(model, "WanTransformer3DModel"):
        return Inputs((), _noisy(_wan(model, size), seed))
    (host,) = find_hosts(model)
    arguments = _noisy(host.example(*size.latent, size.samples), seed)
    if guided and isinstance(sample := arguments[host.sample], Tensor):
        half = size.samples // 2
        sample[half:] = sample[:half]
    # Pass the sample by position, as pipelines do: tomesd reads its size from there.
    return Inputs((arguments.pop(host.sample),), arguments)


def _noisy(arguments: dict[str, Any], seed: int) -> dict[str, Any]:
    """Fill latents and text embeddings (float tensors of at least three dimensions) with noise, in place."""
    generator = torch.Generator("cpu").manual_seed(seed)
    for value in arguments.values():
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 3:
            # The noise is drawn on the CPU, so that it is the same for every device.
            value.copy_(torch.randn(value.shape, generator=generator))
    return arguments


def _wan(model: Any, size: InputSize) -> dict[str, Any]:
    """Make the arguments of Wan for the requested number of frames."""
    zeros = blank(model, size.samples)
    latent_frames = (size.frames - 1) // 4 + 1
    return {
        "hidden_states": zeros(model.config.in_channels, latent_frames, *size.latent),
        "timestep": zeros().fill_(500),
        "encoder_hidden_states": zeros(512, model.config.text_dim),
    }
