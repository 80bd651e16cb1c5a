"""What a denoiser is called with when it is measured alone: random inputs of the right shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tokenmerge.models import find_hosts
from tokenmerge.models.base import is_a

__all__ = ["InputSize", "Inputs", "example_inputs"]

_TEXT_TOKENS = {"sd3": 77 + 256, "flux": 512, "wan": 512}


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


def example_inputs(model: nn.Module, size: InputSize, seed: int) -> Inputs:
    """Inputs for one call, with Gaussian noise for latents and text.

    Raises:
        UnsupportedModelError: how to call the model is not known.
    """
    for class_name, example in _EXAMPLES.items():
        if is_a(model, class_name):
            return Inputs((), _noisy(example(model, size), seed))
    (host,) = find_hosts(model)
    arguments = _noisy(host.example(*size.latent, size.samples), seed)
    # By position, as the pipelines pass them: tomesd reads the sample's size from there.
    return Inputs((arguments.pop(host.sample), arguments.pop(host.timestep)), arguments)


def _noisy(arguments: dict[str, Any], seed: int) -> dict[str, Any]:
    """Fill latents and text, the float tensors of three dimensions and more, with noise in place."""
    generator = torch.Generator("cpu").manual_seed(seed)
    for value in arguments.values():
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 3:
            # Made on the CPU, so that every device gets the same.
            value.copy_(torch.randn(value.shape, generator=generator))
    return arguments


def _sd3(model: Any, size: InputSize) -> dict[str, Any]:
    zeros = _zeros(model, size.samples)
    return {
        "hidden_states": zeros(model.config.in_channels, *size.latent),
        "encoder_hidden_states": zeros(_TEXT_TOKENS["sd3"], model.config.joint_attention_dim),
        "pooled_projections": zeros(model.config.pooled_projection_dim),
        "timestep": zeros().fill_(500),
    }


def _flux(model: Any, size: InputSize) -> dict[str, Any]:
    zeros = _zeros(model, size.samples)
    height, width = (side // 2 for side in size.latent)
    positions = torch.zeros(height, width, 3, device=model.device, dtype=model.dtype)
    positions[..., 1] = torch.arange(height, device=model.device)[:, None]
    positions[..., 2] = torch.arange(width, device=model.device)
    return {
        "hidden_states": zeros(height * width, model.config.in_channels),
        "encoder_hidden_states": zeros(_TEXT_TOKENS["flux"], model.config.joint_attention_dim),
        "pooled_projections": zeros(model.config.pooled_projection_dim),
        "timestep": zeros().fill_(0.5),
        "img_ids": positions.view(-1, 3),
        "txt_ids": torch.zeros(_TEXT_TOKENS["flux"], 3, device=model.device, dtype=model.dtype),
        "guidance": zeros().fill_(3.5) if model.config.guidance_embeds else None,
    }


def _wan(model: Any, size: InputSize) -> dict[str, Any]:
    zeros = _zeros(model, size.samples)
    latent_frames = (size.frames - 1) // 4 + 1
    return {
        "hidden_states": zeros(model.config.in_channels, latent_frames, *size.latent),
        "timestep": zeros().fill_(500),
        "encoder_hidden_states": zeros(_TEXT_TOKENS["wan"], model.config.text_dim),
    }


def _zeros(model: Any, samples: int) -> Callable[..., Tensor]:
    return lambda *shape: torch.zeros(samples, *shape, device=model.device, dtype=model.dtype)


_EXAMPLES: dict[str, Callable[[Any, InputSize], dict[str, Any]]] = {
    "SD3Transformer2DModel": _sd3,
    "FluxTransformer2DModel": _flux,
    "WanTransformer3DModel": _wan,
}
