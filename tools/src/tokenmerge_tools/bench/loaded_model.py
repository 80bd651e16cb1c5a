"""Loads the denoiser of a benchmark, once for all cells that share its dtype."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from tokenmerge.models.base import is_a
from tokenmerge_tools.bench.geometry import PREFIX, build_denoiser, depth_note, find_geometry
from tokenmerge_tools.pipelines.call import latent_scale
from tokenmerge_tools.pipelines.loading import denoiser_of, find_model, guides, load_pipeline
from tokenmerge_tools.pipelines.meta_model import load_sketch

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
        notes = ("random weights", *filter(None, [depth_note(model)]))
        return LoadedModel(build_denoiser(geometry, dtype, device, seed), 8, guided, notes)
    pipe = load_pipeline(find_model(model), dtype, device)
    return LoadedModel(denoiser_of(pipe), latent_scale(pipe), guides(pipe, guidance))
