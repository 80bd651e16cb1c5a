"""``geometry:NAME``: a model with random weights, for measuring speed without a download."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tokenmerge.errors import ConfigError
from tokenmerge_tools.bench.geometries import GEOMETRIES, Geometry
from tokenmerge_tools.pipelines.loading import require_diffusers

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

PREFIX = "geometry:"
_NOISE_SCHEDULE = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
}
_SCHEDULER_CONFIGS: dict[str, dict[str, Any]] = {
    "PNDMScheduler": {**_NOISE_SCHEDULE, "skip_prk_steps": True},
    "EulerDiscreteScheduler": _NOISE_SCHEDULE,
}


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
    build = getattr(diffusers, geometry.denoiser)
    return _random(lambda: build(**geometry.config), dtype, device, seed)


def build_pipeline(
    geometry: Geometry, dtype: torch.dtype, device: torch.device, seed: int
) -> DiffusionPipeline:
    """Build the text-to-image pipeline without text encoders; it takes prompt embeddings instead."""
    diffusers = require_diffusers("a pipeline with random weights")
    if geometry.pipeline is None:
        raise ConfigError(f"scope: only the denoiser of {geometry.title} can be built; use --scope denoiser")
    codec = _random(lambda: diffusers.AutoencoderKL(**geometry.codec), dtype, device, seed)
    codec.register_to_config(force_upcast=geometry.pipeline == "StableDiffusionXLPipeline")
    parts: dict[str, Any] = {
        "vae": codec,
        "text_encoder": None,
        "tokenizer": None,
        "unet": build_denoiser(geometry, dtype, device, seed),
        "scheduler": getattr(diffusers, geometry.scheduler)(**_SCHEDULER_CONFIGS[geometry.scheduler]),
    }
    if geometry.pipeline == "StableDiffusionXLPipeline":
        parts |= {"text_encoder_2": None, "tokenizer_2": None, "add_watermarker": False}
    else:
        parts |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    return getattr(diffusers, geometry.pipeline)(**parts)


def _random(build: Callable[[], Any], dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), device:
        torch.manual_seed(seed)
        model = build().eval()
    kept = set(model._keep_in_fp32_modules or ())
    for name, parameter in model.named_parameters():
        # Some modules stay in float32, as they do when weights are loaded.
        parameter.data = parameter.data.to(device, torch.float32 if kept & set(name.split(".")) else dtype)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    return model
