"""Builds the denoiser of a pipeline without weights, from its configs."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tokenmerge.config.checks import as_items
from tokenmerge.errors import ConfigError, UnsupportedModelError, reason_of, short_repr
from tokenmerge.models.find import find_hosts
from tokenmerge.report import check_merging as check_hosts
from tokenmerge_tools.method_spec import MethodSpec
from tokenmerge_tools.pipelines.loading import (
    ABSENT,
    DENOISERS,
    ModelSource,
    SourceKind,
    find_model,
    loading,
    no_denoiser,
    read_index,
    require_diffusers,
)
from tokenmerge_tools.pipelines.settings import check_size

if TYPE_CHECKING:
    from diffusers import ModelMixin


@dataclasses.dataclass(frozen=True)
class ModelSketch:
    """A pipeline without weights, made from its configs. The denoiser is on the meta device.

    ``pipeline`` has the denoiser, a scheduler and defaults, and cannot run. ``scale`` is the number of pixels
    per latent position along each side, and ``size`` the default (width, height) in pixels, None if unknown.
    """

    denoiser: Any
    pipeline: Any
    scale: int
    size: tuple[int, int] | None


def _own_size(denoiser: ModelMixin, scale: int) -> tuple[int, int] | None:
    """Return the default (width, height) in pixels from the config, or else from the model's family."""
    size = default_size(denoiser.config, scale)
    if size is not None:
        return size
    with contextlib.suppress(UnsupportedModelError):
        host = find_hosts(denoiser)[0]
        if host.sample_size is not None:
            height, width = host.sample_size
            return width * scale, height * scale
    return None


def load_sketch(source: ModelSource) -> ModelSketch:
    """Build the denoiser from its config alone, on the meta device."""
    if source.kind is SourceKind.CHECKPOINT:
        raise ConfigError(
            f"model: {source.location} is a single checkpoint, which holds weights and no config; give a "
            "diffusers folder or a hub id of the same architecture"
        )
    require_diffusers("reading a diffusers model")
    index = read_index(source)
    name = next((name for name in DENOISERS if index.get(name, ABSENT) != ABSENT), None)
    if name is None:
        raise UnsupportedModelError(no_denoiser(index.get("_class_name", "this pipeline")))
    denoiser = _component(source, name, index[name])
    scale = 1  # a pipeline without a VAE denoises pixels
    if index.get("vae", ABSENT) != ABSENT:
        scale = _codec_scale(_component(source, "vae", index["vae"]))
    return ModelSketch(denoiser, _pipeline(source, index, name, denoiser), scale, _own_size(denoiser, scale))


def _pipeline(source: ModelSource, index: dict[str, Any], name: str, denoiser: ModelMixin) -> Any:
    """Return a pipeline with a denoiser and a scheduler, or the denoiser if diffusers knows no pipeline."""
    import diffusers

    pipeline_class: Any = getattr(diffusers, str(index.get("_class_name")), None)
    scheduler_class = getattr(diffusers, str((index.get("scheduler") or ABSENT)[1]), None)
    if pipeline_class is None or scheduler_class is None:
        return denoiser
    with loading(source.location):
        scheduler = scheduler_class.from_pretrained(source.location, subfolder="scheduler")
    pipeline = pipeline_class.__new__(pipeline_class)
    vars(pipeline).update({name: denoiser, "scheduler": scheduler})
    return pipeline


def default_size(config: dict[str, Any], scale: int) -> tuple[int, int] | None:
    """Return the default (width, height) in pixels in the denoiser's config, or None if it has none."""
    sample = config.get("sample_size")
    if sample is None:
        return None
    sides = [sample, sample] if isinstance(sample, int) else as_items(sample) or ()
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ConfigError(
            "model: expected one or two integers above 0 as sample_size in the denoiser's config.json, got "
            f"{short_repr(sample)}; correct that file"
        )
    height, width = sides
    return width * scale, height * scale


def _component(source: ModelSource, name: str, entry: object) -> ModelMixin:
    """Build one component of a pipeline from its config and its entry in the index."""
    class_name = entry[1] if isinstance(entry, list | tuple) and len(entry) == 2 else None
    component_class = _model_class(class_name, name)
    file = Path(source.location) / name / "config.json"
    if source.kind is not SourceKind.HUB and not file.is_file():
        raise ConfigError(
            f"model: there is no file {file}, but model_index.json lists the component {name}; "
            "give a folder with the configs of all components"
        )
    with loading(source.location), torch.device("meta"):
        return component_class.from_config(component_class.load_config(source.location, subfolder=name))


def _model_class(name: object, component: str) -> Any:
    import diffusers

    found: Any = getattr(diffusers, name, None) if isinstance(name, str) else None
    if not (isinstance(found, type) and issubclass(found, diffusers.ModelMixin)):
        raise UnsupportedModelError(
            f"model: diffusers {diffusers.__version__} has no class {name} for the {component}; use "
            "another pipeline, or another version of diffusers"
        )
    return found


def _codec_scale(codec: ModelMixin) -> int:
    """Return the pixels per latent position along each side."""
    if "block_out_channels" in codec.config:
        return int(2 ** (len(codec.config["block_out_channels"]) - 1))
    if "scale_factor_spatial" in codec.config:
        return int(codec.config["scale_factor_spatial"])
    raise UnsupportedModelError(
        f"model: {type(codec).__name__} does not say how many pixels one latent position covers; use a "
        "pipeline with an image VAE"
    )


def check_merging(sketch: ModelSketch, size: tuple[int, int], method: MethodSpec) -> None:
    """Check that a method merges something in a model, unless it chooses its settings by the model."""
    width, height = check_size(size, sketch.scale)
    if not method.needs_model:
        check_hosts(find_hosts(sketch.denoiser), method.config(), (height, width))


def check_drawable(sketch: ModelSketch, size: tuple[int, int]) -> None:
    """Check that the pipeline draws images of this (width, height), by the pipeline's own check.

    A pipeline checks the size first. Its errors about other arguments, which are not given, are ignored.
    """
    check = getattr(sketch.pipeline, "check_inputs", None)
    if check is None:
        return
    width, height = size
    given = {"prompt": "a", "height": height, "width": width}
    pipeline = copy.copy(sketch.pipeline)
    vars(pipeline).update(vae_scale_factor=sketch.scale, patch_size=sketch.denoiser.config.get("patch_size"))
    parameters = inspect.signature(check).parameters
    try:
        check(**{name: given.get(name) for name in parameters})
    except Exception as error:
        reason = reason_of(error)
        if "divisible by" not in reason:
            return
        needed = re.search(r"divisible by (\d+)", reason)
        if needed is not None:
            check_size(size, int(needed[1]))  # its error names the nearest size
        raise cannot_draw(type(pipeline).__name__, reason) from error


def cannot_draw(model: str, reason: str) -> ConfigError:
    """Return the error for a size that a pipeline refuses."""
    return ConfigError(f"size: {model} cannot draw it ({reason}); give another --size")


def checked_source(
    model: str, size: tuple[int, int] | None, method: MethodSpec | None, draws: bool = False
) -> ModelSource:
    """Find a model, and check by its configs, before any weights are read, that a method merges in it.

    If the pipeline ``draws``, it must take the size too.
    """
    source = find_model(model)
    if source.kind is not SourceKind.CHECKPOINT:
        sketch = load_sketch(source)
        if draws and size is not None:
            check_size(size, sketch.scale)
            check_drawable(sketch, size)
        if (known_size := size or sketch.size) is not None and method is not None:
            check_merging(sketch, known_size, method)
    return source
