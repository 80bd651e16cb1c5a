"""``geometry:NAME``: a model with random weights, for measuring speed without a download."""

from __future__ import annotations

import dataclasses
import math
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

    ``config`` has the arguments of the denoiser's class in diffusers that differ from their defaults, and
    ``depth`` names those that set the number of layers, which ``@DEPTH`` multiplies. Width and height are in
    pixels, and must be multiples of ``multiple``. ``guided``: classifier-free guidance doubles the batch.
    """

    title: str
    denoiser: str
    config: dict[str, Any]
    size: tuple[int, int]
    multiple: int
    depth: tuple[str, ...]
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
    """Find the architecture of ``geometry:NAME`` or ``geometry:NAME@DEPTH``, reduced to that depth.

    ``geometry:flux@0.25`` has a quarter of the layers, and at least one of each kind.
    """
    known, _, depth = name.removeprefix(PREFIX).partition("@")
    if known not in GEOMETRIES:
        raise ConfigError(f"model: expected {PREFIX} and one of {', '.join(GEOMETRIES)}, got {name!r}")
    if not depth:
        return GEOMETRIES[known]
    try:
        fraction = float(depth)
    except ValueError:
        fraction = math.nan
    if not 0 < fraction <= 1:
        raise ConfigError(f"model: expected a depth with 0 < depth ≤ 1 after @, got {depth!r} in {name!r}")
    return _cut(GEOMETRIES[known], fraction)


def _cut(geometry: Geometry, fraction: float) -> Geometry:
    def cut(layers: Any) -> Any:
        if isinstance(layers, tuple):
            return tuple(map(cut, layers))
        return max(1, round(layers * fraction))

    config = {
        name: cut(value) if name in geometry.depth else value for name, value in geometry.config.items()
    }
    return dataclasses.replace(geometry, config=config)


def depth_note(name: str) -> str:
    """Describe how far the depth of an architecture was reduced. Empty if it was not.

    >>> depth_note("geometry:flux@0.25")
    'cut to num_layers 5 of 19, num_single_layers 10 of 38'
    """
    whole = GEOMETRIES[name.removeprefix(PREFIX).partition("@")[0]]
    config = find_geometry(name).config
    changed = [part for part in whole.config if config[part] != whole.config[part]]
    return "cut to " + ", ".join(f"{p} {config[p]} of {whole.config[p]}" for p in changed) if changed else ""


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
