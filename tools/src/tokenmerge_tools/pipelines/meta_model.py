"""Builds the denoiser of a pipeline without weights, from its configs."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tokenmerge.config.checks import as_items
from tokenmerge.errors import ConfigError, UnsupportedModelError, shown
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

INDEX = "model_index.json"
CONFIG = "config.json"
_USUAL_SCALE = 8


@dataclasses.dataclass(frozen=True)
class ModelSketch:
    """A pipeline without weights, made from its configs.

    Attributes:
        denoiser: on the meta device.
        scale: pixels per latent position along each side.
        size: default (width, height) in pixels; None if unknown.
        notes: the assumptions that were made.
    """

    denoiser: Any
    scale: int
    size: tuple[int, int] | None
    notes: tuple[str, ...] = ()


def sketch(name: str) -> ModelSketch:
    """Build the denoiser that a name, a folder or a config file stands for.

    The name is one for :func:`find_model`, or the path of a ``model_index.json``, of a denoiser's
    ``config.json``, or of the folder of that config.
    """
    path = Path(name)
    if path.name == INDEX:
        return load_sketch(find_model(str(path.parent)))
    if (path / CONFIG).is_file() and not (path / INDEX).is_file():
        path = path / CONFIG
    return _sketch_of_denoiser(path) if path.suffix == ".json" else load_sketch(find_model(name))


def _sketch_of_denoiser(file: Path) -> ModelSketch:
    """Build a denoiser from its own config. The scale is that of the VAE in the folder beside it, or 8."""
    require_diffusers("reading a diffusers model")
    config = _read_config(file)
    denoiser = _from_config(config, "denoiser", file)
    codec = file.parent.parent / "vae" / CONFIG
    notes: tuple[str, ...] = ()
    if codec.is_file():
        scale = _codec_scale(_from_config(_read_config(codec), "vae", codec))
    else:
        scale = _USUAL_SCALE
        notes = (f"pixels: assumed the usual {scale} per latent position, because there is no {codec}",)
    return ModelSketch(denoiser, scale, _own_size(denoiser, scale), notes)


def _from_config(config: dict[str, Any], component: str, file: Path) -> ModelMixin:
    model_class = _model_class(config["_class_name"], component)
    with loading(str(file)):
        return _weightless(model_class, config)


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"model: there is no file {file}; give a config.json or a model_index.json"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model: cannot read {file} as JSON: {error}"[:300]) from error
    if not isinstance(config, dict) or "_class_name" not in config:
        raise ConfigError(
            f"model: {file} has no _class_name, so it is not the config of a diffusers model; give the "
            "config.json of a unet or transformer, or the model_index.json of a pipeline"
        )
    return config


def _own_size(denoiser: ModelMixin, scale: int) -> tuple[int, int] | None:
    """Return the default (width, height) in pixels from the config, or else from the model's family."""
    if (size := default_size(denoiser.config, scale)) is not None:
        return size
    with contextlib.suppress(UnsupportedModelError):
        host = find_hosts(denoiser)[0]
        if host.sample_size is not None:
            height, width = host.sample_size
            return width * scale, height * scale
    return None


def solver_and_guidance(source: ModelSource) -> tuple[str | None, float | None]:
    """Return a pipeline's class of scheduler and default scale of guidance; None: unknown, or there is none.

    The pipeline's class must be one of diffusers, and show whether it guides.
    """
    diffusers, index = require_diffusers("reading a diffusers model"), read_index(source)
    pipeline: Any = getattr(diffusers, str(index.get("_class_name")), None)
    scale = None
    if hasattr(pipeline, "do_classifier_free_guidance"):
        given = inspect.signature(pipeline.__call__).parameters.get("guidance_scale")
        scale = given.default if given is not None and isinstance(given.default, int | float) else None
    return (index.get("scheduler") or ABSENT)[1], scale


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
    return ModelSketch(denoiser, scale, _own_size(denoiser, scale))


def default_size(config: dict[str, Any], scale: int) -> tuple[int, int] | None:
    """Return the default (width, height) in pixels in the denoiser's config; None if it has none."""
    sample = config.get("sample_size")
    if sample is None:
        return None
    sides = [sample, sample] if isinstance(sample, int) else as_items(sample) or ()
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ConfigError(
            "model: expected one or two integers above 0 as sample_size in the denoiser's config.json, got "
            f"{shown(sample)}; correct that file"
        )
    height, width = sides
    return width * scale, height * scale


def _component(source: ModelSource, name: str, entry: object) -> ModelMixin:
    """Build one component of a pipeline from its config and its entry in the index."""
    class_name = entry[1] if isinstance(entry, list | tuple) and len(entry) == 2 else None
    component_class = _model_class(class_name, name)
    file = Path(source.location) / name / CONFIG
    if source.kind is not SourceKind.HUB and not file.is_file():
        raise ConfigError(
            f"model: there is no file {file}, but {INDEX} lists the component {name}; give a folder with the "
            "configs of all components"
        )
    with loading(source.location):
        return _weightless(component_class, component_class.load_config(source.location, subfolder=name))


def _model_class(name: object, component: str) -> Any:
    import diffusers

    found: Any = getattr(diffusers, name, None) if isinstance(name, str) else None
    if not (isinstance(found, type) and issubclass(found, diffusers.ModelMixin)):
        raise UnsupportedModelError(
            f"model: diffusers {diffusers.__version__} has no class {name} for the {component}; use "
            "another pipeline, or another version of diffusers"
        )
    return found


def _weightless(model_class: Any, config: Any) -> ModelMixin:
    with torch.device("meta"):
        return model_class.from_config(config)


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


def checked_source(model: str, size: tuple[int, int] | None, method: MethodSpec | None) -> ModelSource:
    """Find a model, and check by its configs, before any weights are read, that a method merges in it."""
    source = find_model(model)
    if source.kind is not SourceKind.CHECKPOINT:
        sketch = load_sketch(source)
        if (known_size := size or sketch.size) is not None and method is not None:
            check_merging(sketch, known_size, method)
    return source
