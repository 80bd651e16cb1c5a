"""``geometry:NAME``: a model with random weights, for measuring speed without a download."""

from __future__ import annotations

import dataclasses
from importlib import resources
from typing import Any

import torch
from torch import nn

from tokenmerge.errors import ConfigError
from tokenmerge_tools.files import toml_parser
from tokenmerge_tools.pipelines.loading import require_diffusers

PREFIX = "geometry:"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """The architecture of one model.

    ``config`` has the arguments of the denoiser's class in diffusers that differ from their defaults. Width
    and height are in pixels, and must be multiples of ``multiple``. ``guided``: classifier-free guidance
    doubles the batch.
    """

    title: str
    denoiser: str
    config: dict[str, Any]
    size: tuple[int, int]
    multiple: int
    guided: bool = True


def _read_geometries() -> dict[str, Geometry]:
    text = (resources.files("tokenmerge_tools.bench") / "geometries.toml").read_text(encoding="utf-8")
    return {name: Geometry(**_tuples(values)) for name, values in toml_parser().loads(text).items()}


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _tuples(own) for name, own in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


GEOMETRIES = _read_geometries()


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
