"""``geometry:NAME``: a model with random weights, for measuring speed without a download."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from importlib import resources
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tokenmerge.errors import ConfigError
from tokenmerge_tools.files import toml_parser
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


# The VAE of Stable Diffusion. The one of SDXL has the same layers.
_CODEC = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "sample_size": 512,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """The architecture of one model.

    ``config`` has the arguments of the denoiser's class in diffusers that differ from their defaults, and
    ``depth`` names those that set the number of layers, which ``@DEPTH`` multiplies. Width and height are in
    pixels, and must be multiples of ``multiple``. ``guided``: classifier-free guidance doubles the batch.
    ``pipeline`` is a text-to-image pipeline that can run on prompt embeddings alone; None: only the denoiser
    can be measured. The scheduler uses the noise schedule of Stable Diffusion. ``codec`` has the arguments of
    the pipeline's ``AutoencoderKL``.
    """

    title: str
    denoiser: str
    config: dict[str, Any]
    size: tuple[int, int]
    multiple: int
    depth: tuple[str, ...]
    guided: bool = True
    pipeline: str | None = None
    scheduler: str = "PNDMScheduler"
    codec: dict[str, Any] = dataclasses.field(default_factory=lambda: dict(_CODEC))


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
