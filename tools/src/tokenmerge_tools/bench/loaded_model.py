"""The denoiser of a benchmark, and its random inputs.

It is loaded, or built with random weights as ``geometry:NAME``, which measures speed without a download.
"""

from __future__ import annotations

import dataclasses
from importlib import resources
from typing import Any

import torch
from torch import Tensor, nn

from tokenmerge.errors import ConfigError
from tokenmerge.models.base import is_a
from tokenmerge.models.family import Blank
from tokenmerge.models.find import find_hosts
from tokenmerge_tools.files import toml_parser
from tokenmerge_tools.pipelines.call import latent_scale
from tokenmerge_tools.pipelines.loading import (
    denoiser_of,
    find_model,
    guides,
    load_pipeline,
    require_diffusers,
)
from tokenmerge_tools.pipelines.meta_model import load_sketch

_WITH_FRAMES = "WanTransformer3DModel"
PREFIX = "geometry:"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """The architecture of one model.

    ``config`` has the arguments of the denoiser's class in diffusers that differ from their defaults. Width
    and height are in pixels, and must be multiples of ``multiple``. ``guided`` says whether the batch is
    doubled for guidance.
    """

    title: str
    denoiser: str
    config: dict[str, Any]
    size: tuple[int, int]
    multiple: int
    guided: bool = True


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _tuples(entry) for name, entry in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


_FILE = resources.files("tokenmerge_tools.bench") / "geometries.toml"
_VALUES = toml_parser().loads(_FILE.read_text(encoding="utf-8"))
GEOMETRIES = {name: Geometry(**_tuples(values)) for name, values in _VALUES.items()}


def find_geometry(name: str) -> Geometry:
    """Find the architecture of ``geometry:NAME``."""
    known = name.removeprefix(PREFIX)
    if known not in GEOMETRIES:
        raise ConfigError(f"model: expected {PREFIX} and one of {', '.join(GEOMETRIES)}, got {name!r}")
    return GEOMETRIES[known]


def build_denoiser(geometry: Geometry, dtype: torch.dtype, device: torch.device, seed: int) -> nn.Module:
    """Return the denoiser with random weights, in evaluation mode."""
    diffusers = require_diffusers("a model with random weights")
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), device:
        torch.manual_seed(seed)
        model: Any = getattr(diffusers, geometry.denoiser)(**geometry.config).eval()
    kept = set(model._keep_in_fp32_modules or ())
    for name, parameter in model.named_parameters():
        # Some modules stay in float32, as they do when weights are loaded.
        parameter.data = parameter.data.to(device, torch.float32 if kept & set(name.split(".")) else dtype)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    return model


def example_inputs(
    model: Any, latent: tuple[int, int], samples: int, *, seed: int = 0, guided: bool, frames: int = 1
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of one call, with Gaussian noise for latents and text embeddings.

    ``latent`` is the (height, width) of the latents, and ``frames`` is the number of frames of a video. If
    ``guided``, the batch of ``samples`` holds every sample twice, as with classifier-free guidance.
    """
    if is_a(model, _WITH_FRAMES):
        zeros = Blank(model, samples)
        video = {
            "hidden_states": zeros(model.config.in_channels, (frames - 1) // 4 + 1, *latent),
            "timestep": zeros().fill_(500),
            "encoder_hidden_states": zeros(512, model.config.text_dim),
        }
        return (), _noisy(video, seed)
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


def find_facts(model: str) -> tuple[tuple[int, int] | None, int, bool]:
    """Read the configs of ``geometry:NAME``, a bundled model, a diffusers folder or a hub id.

    The result has three values: the default (width, height) in pixels, the number that sizes must be a
    multiple of, and whether the model takes several frames.
    """
    if model.startswith(PREFIX):
        geometry = find_geometry(model)
        return geometry.size, geometry.multiple, geometry.denoiser == _WITH_FRAMES
    sketch = load_sketch(find_model(model))
    return sketch.size, sketch.scale, is_a(sketch.denoiser, _WITH_FRAMES)


def load_model(
    model: str, dtype: torch.dtype, device: torch.device, guidance: float | None, seed: int
) -> LoadedModel:
    """Load a denoiser, or build it from its geometry with random weights from the seed.

    ``model`` is as for :func:`find_facts`. A guidance scale of None means the model's default.
    """
    if model.startswith(PREFIX):
        geometry = find_geometry(model)
        guided = geometry.guided and (guidance is None or guidance > 1)
        return LoadedModel(build_denoiser(geometry, dtype, device, seed), 8, guided, ("random weights",))
    pipe = load_pipeline(find_model(model), dtype, device)
    return LoadedModel(denoiser_of(pipe), latent_scale(pipe), guides(pipe, guidance))
