"""Random inputs of the right shapes, for a denoiser that is measured alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from tokenmerge.models.base import is_a
from tokenmerge.models.dummy_inputs import blank
from tokenmerge.models.find import find_hosts

__all__ = ["InputSize", "Inputs", "example_inputs"]


@dataclasses.dataclass(frozen=True)
class InputSize:
    """Size of one call.

    Args:
        height: in pixels.
        width: in pixels.
        scale: pixels per latent position, along each side.
        samples: rows of the batch; guidance makes two of each picture.
        frames: of a video model, in pictures.
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
    """Inputs for one call, with Gaussian noise for latents and text.

    Args:
        model: the denoiser.
        size: of the call.
        seed: of the noise.
        guided: whether the batch is the same samples twice, with and without the prompt.

    Raises:
        UnsupportedModelError: how to call the model is not known.
    """
    if is_a(model, "WanTransformer3DModel"):
        return Inputs((), _noisy(_wan(model, size), seed))
    (host,) = find_hosts(model)
    arguments = _noisy(host.example(*size.latent, size.samples), seed)
    if guided and isinstance(sample := arguments[host.sample], Tensor):
        half = size.samples // 2
        sample[half:] = sample[:half]
    # By position, as the pipelines pass it: tomesd reads the sample's size from there.
    return Inputs((arguments.pop(host.sample),), arguments)


def _noisy(arguments: dict[str, Any], seed: int) -> dict[str, Any]:
    """Fill latents and text, the float tensors of three dimensions and more, with noise in place."""
    generator = torch.Generator("cpu").manual_seed(seed)
    for value in arguments.values():
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 3:
            # Made on the CPU, so that every device gets the same.
            value.copy_(torch.randn(value.shape, generator=generator))
    return arguments


def _wan(model: Any, size: InputSize) -> dict[str, Any]:
    """As its host's example, with as many frames as are wanted."""
    zeros = blank(model, size.samples)
    latent_frames = (size.frames - 1) // 4 + 1
    return {
        "hidden_states": zeros(model.config.in_channels, latent_frames, *size.latent),
        "timestep": zeros().fill_(500),
        "encoder_hidden_states": zeros(512, model.config.text_dim),
    }
