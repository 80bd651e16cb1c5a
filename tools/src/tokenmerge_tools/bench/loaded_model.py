"""The denoiser of a benchmark, loaded or built with random weights, and its random inputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from tokenmerge.models.base import is_a
from tokenmerge.models.family import Blank
from tokenmerge.models.find import find_hosts
from tokenmerge_tools.bench.geometry import PREFIX, build_denoiser, find_geometry
from tokenmerge_tools.pipelines.call import latent_scale
from tokenmerge_tools.pipelines.loading import denoiser_of, find_model, guides, load_pipeline
from tokenmerge_tools.pipelines.meta_model import load_sketch


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
    zeros = Blank(model, size.samples)
    latent_frames = (size.frames - 1) // 4 + 1
    return {
        "hidden_states": zeros(model.config.in_channels, latent_frames, *size.latent),
        "timestep": zeros().fill_(500),
        "encoder_hidden_states": zeros(512, model.config.text_dim),
    }


_WITH_FRAMES = "WanTransformer3DModel"


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """Facts in a model's config files.

    Width and height are in pixels and must be multiples of a number. ``video``: there may be several frames.
    """

    size: tuple[int, int] | None
    multiple: int
    video: bool = False


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A loaded denoiser. Variants are applied to copies of it.

    ``scale`` is the number of pixels per latent position along each side. ``guided`` says whether
    classifier-free guidance doubles the batch.
    """

    denoiser: nn.Module
    scale: int
    guided: bool
    notes: tuple[str, ...] = ()


def find_info(model: str) -> ModelInfo:
    """Read a model's config files without loading its weights.

    The model is ``geometry:NAME``, a bundled model, a diffusers folder or a hub id.
    """
    if model.startswith(PREFIX):
        geometry = find_geometry(model)
        return ModelInfo(geometry.size, geometry.multiple, video=geometry.denoiser == _WITH_FRAMES)
    sketch = load_sketch(find_model(model))
    return ModelInfo(sketch.size, sketch.scale, video=is_a(sketch.denoiser, _WITH_FRAMES))


def load_model(
    model: str, dtype: torch.dtype, device: torch.device, guidance: float | None, seed: int
) -> LoadedModel:
    """Load a denoiser, or build it from its geometry with random weights from the seed.

    ``model`` is as for :func:`find_info`. A guidance scale of None means the model's default.
    """
    if model.startswith(PREFIX):
        geometry = find_geometry(model)
        guided = geometry.guided and (guidance is None or guidance > 1)
        return LoadedModel(build_denoiser(geometry, dtype, device, seed), 8, guided, ("random weights",))
    pipe = load_pipeline(find_model(model), dtype, device)
    return LoadedModel(denoiser_of(pipe), latent_scale(pipe), guides(pipe, guidance))
