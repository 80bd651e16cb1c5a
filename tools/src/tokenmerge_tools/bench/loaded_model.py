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

_WITH_FRAMES = "WanTransformer3DModel"


def example_inputs(
    model: nn.Module, latent: tuple[int, int], samples: int, *, seed: int = 0, guided: bool, frames: int = 1
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of one call, with Gaussian noise for latents and text embeddings.

    ``latent`` is the (height, width) of the latents, and ``frames`` are those of a video. If ``guided``, the
    batch of ``samples`` holds every sample twice, as with classifier-free guidance.
    """
    if is_a(model, _WITH_FRAMES):
        return (), _noisy(_wan(model, latent, samples, frames), seed)
    (host,) = find_hosts(model)
    arguments = _noisy(host.example(*latent, samples), seed)
    if guided and isinstance(sample := arguments[host.sample], Tensor):
        half = samples // 2
        sample[half:] = sample[:half]
    # Pass the sample by position, as pipelines do: tomesd reads its size from there.
    return (arguments.pop(host.sample),), arguments


def _noisy(arguments: dict[str, Any], seed: int) -> dict[str, Any]:
    """Fill latents and text embeddings (float tensors of at least three dimensions) with noise, in place."""
    generator = torch.Generator("cpu").manual_seed(seed)
    for value in arguments.values():
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 3:
            # The noise is drawn on the CPU, so that it is the same for every device.
            value.copy_(torch.randn(value.shape, generator=generator))
    return arguments


def _wan(model: Any, latent: tuple[int, int], samples: int, frames: int) -> dict[str, Any]:
    """Return the arguments of Wan for a number of frames."""
    zeros = Blank(model, samples)
    latent_frames = (frames - 1) // 4 + 1
    return {
        "hidden_states": zeros(model.config.in_channels, latent_frames, *latent),
        "timestep": zeros().fill_(500),
        "encoder_hidden_states": zeros(512, model.config.text_dim),
    }


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
    """Read the configs of ``geometry:NAME``, a bundled model, a diffusers folder or a hub id."""
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
