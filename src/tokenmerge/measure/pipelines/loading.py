"""From what a user types after ``--model`` to a diffusers pipeline, or to its denoiser without weights."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tokenmerge.errors import ConfigError, MissingExtraError, UnsupportedModelError
from tokenmerge.measure import demo

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin

__all__ = [
    "DEFAULT_MODEL",
    "ModelSketch",
    "ModelSource",
    "SourceKind",
    "denoiser_name",
    "find_model",
    "guides",
    "load_pipeline",
    "load_sketch",
    "require_diffusers",
]

DEFAULT_MODEL = demo.NAMES[0]

_DENOISERS = ("unet", "transformer")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_ACCEPTED = (
    f"a bundled model ({', '.join(demo.NAMES)}), a diffusers folder (with model_index.json), "
    "a .safetensors checkpoint or a hub id such as owner/name"
)


class SourceKind(enum.Enum):
    """Where a model comes from."""

    DEMO = "bundled model"
    FOLDER = "diffusers folder"
    CHECKPOINT = "single checkpoint"
    HUB = "hub id"


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A model that was found, not yet loaded.

    Args:
        kind: where it comes from.
        location: path of the folder or file, or the hub id.
    """

    kind: SourceKind
    location: str


@dataclasses.dataclass(frozen=True)
class ModelSketch:
    """What a pipeline's configs alone tell.

    Args:
        denoiser: the UNet or transformer on the meta device: modules and shapes, no weights.
        scale: pixels per latent position, along each side.
        size: the model's own picture (width, height) in pixels, or ``None`` where no config says it.
    """

    denoiser: torch.nn.Module
    scale: int
    size: tuple[int, int] | None


def find_model(name: str) -> ModelSource:
    """Decide what ``name`` stands for, reading nothing but the file system.

    Raises:
        ConfigError: it is none of the things a model can be.
    """
    path = Path(name).expanduser()
    if name in demo.NAMES:
        return ModelSource(SourceKind.DEMO, str(demo.path(name)))
    if name and path.is_dir():
        if not (path / "model_index.json").is_file():
            raise ConfigError(
                f"model: the folder {name} has no model_index.json; give the folder that "
                "pipe.save_pretrained() wrote, not one of its subfolders"
            )
        return ModelSource(SourceKind.FOLDER, str(path))
    if path.suffix in {".ckpt", ".pt", ".pth", ".bin"}:
        raise ConfigError(
            f"model: {name} is a pickle, which can run code when it is loaded; convert it to .safetensors"
        )
    if path.suffix == ".safetensors":
        if not path.is_file():
            raise ConfigError(f"model: there is no file {name}")
        return ModelSource(SourceKind.CHECKPOINT, str(path))
    if _HUB_ID.fullmatch(name) and not name.startswith("."):
        return ModelSource(SourceKind.HUB, name)
    raise ConfigError(f"model: {name!r} is no model; expected {_ACCEPTED}")


def load_sketch(source: ModelSource) -> ModelSketch:
    """Build the denoiser from its config alone, on the meta device.

    Raises:
        ConfigError: the configs cannot be read, or the source is a checkpoint, which has none.
        MissingExtraError: diffusers is not installed.
        UnsupportedModelError: the pipeline has no denoiser, or its codec's scale is unknown.
    """
    if source.kind is SourceKind.CHECKPOINT:
        raise ConfigError(
            f"model: {source.location} is a single checkpoint, which holds weights and no config; give a "
            "diffusers folder or a hub id of the same architecture"
        )
    diffusers = require_diffusers("reading a diffusers model")
    with _loading(source.location):
        index = diffusers.DiffusionPipeline.load_config(source.location)
    name = next((name for name in _DENOISERS if index.get(name, [None])[0]), None)
    if name is None:
        raise UnsupportedModelError(_no_denoiser(index.get("_class_name", "this pipeline")))
    denoiser = _weightless(source, name, index[name][1])
    scale = 1  # a pipeline without a codec denoises pixels
    if index.get("vae", [None])[0]:
        scale = _codec_scale(_weightless(source, "vae", index["vae"][1]))
    return ModelSketch(denoiser, scale, _own_size(denoiser.config, scale))


def load_pipeline(
    source: ModelSource, dtype: torch.dtype, device: torch.device, controlnet: str | None = None
) -> DiffusionPipeline:
    """Load a text-to-image pipeline with its weights.

    Args:
        source: what :func:`find_model` found.
        dtype: of all weights.
        device: where the pipeline goes.
        controlnet: folder or hub id of a ControlNet to add.

    Raises:
        ConfigError: it cannot be loaded: the message says why.
        MissingExtraError: diffusers is not installed.
        UnsupportedModelError: the pipeline has no denoiser.
    """
    diffusers = require_diffusers("loading a diffusers model")
    dtype_argument = _dtype_argument(dtype)
    with _loading(source.location):
        if source.kind is SourceKind.CHECKPOINT:
            pipeline_class = _checkpoint_pipeline(source.location)
            pipe = pipeline_class.from_single_file(source.location, **dtype_argument)
        else:
            index = diffusers.DiffusionPipeline.load_config(source.location)
            # Stable Diffusion 3 without T5, say: saved as absent, and yet it has to be named.
            absent = {part: None for part, found in index.items() if found == [None, None]}
            pipe = diffusers.DiffusionPipeline.from_pretrained(source.location, **absent, **dtype_argument)
    denoiser_name(pipe)
    if controlnet is not None:
        with _loading(controlnet):
            config = diffusers.ControlNetModel.load_config(controlnet)
            controlnet_class = getattr(diffusers, config["_class_name"])
            extra = controlnet_class.from_pretrained(controlnet, **dtype_argument)
            pipe = diffusers.AutoPipelineForText2Image.from_pipe(pipe, controlnet=extra)
    return pipe.to(device)


def denoiser_name(pipe: DiffusionPipeline) -> str:
    """Name of the pipeline's component that denoises: ``"unet"`` or ``"transformer"``.

    Raises:
        UnsupportedModelError: it has neither.
    """
    for name in _DENOISERS:
        if getattr(pipe, name, None) is not None:
            return name
    raise UnsupportedModelError(_no_denoiser(type(pipe).__name__))


def guides(pipe: DiffusionPipeline, scale: float | None) -> bool:
    """Whether a pipeline denoises with and without the prompt at this guidance scale; None: at its own.

    Models that were distilled from guided ones take the scale as an input, and run once.
    """
    if getattr(pipe, denoiser_name(pipe)).config.get("guidance_embeds"):
        return False
    if scale is None:
        parameter = inspect.signature(pipe.__call__).parameters.get("guidance_scale")
        scale = None if parameter is None else parameter.default
    return scale is not None and scale > 1


def require_diffusers(needed_by: str) -> Any:
    """Import diffusers, or raise a MissingExtraError that says how to install it."""
    try:
        import diffusers
    except ImportError as error:
        raise MissingExtraError("diffusers", needed_by) from error
    return diffusers


def _no_denoiser(pipeline: str) -> str:
    return f"model: {pipeline} has neither a unet nor a transformer; take a text-to-image diffusion pipeline"


def _own_size(config: dict[str, Any], scale: int) -> tuple[int, int] | None:
    """(width, height) in pixels that the denoiser's config names."""
    sample = config.get("sample_size")
    if sample is None:
        return None
    height, width = (sample, sample) if isinstance(sample, int) else sample
    return width * scale, height * scale


def _weightless(source: ModelSource, name: str, class_name: str) -> ModelMixin:
    """One component of a pipeline on the meta device, from its config."""
    import diffusers

    component_class = getattr(diffusers, class_name, None)
    if component_class is None:
        raise UnsupportedModelError(f"model: diffusers {diffusers.__version__} has no class {class_name}")
    with _loading(source.location):
        config = component_class.load_config(source.location, subfolder=name)
        with torch.device("meta"):
            return component_class.from_config(config)


def _codec_scale(codec: ModelMixin) -> int:
    """Pixels per latent position."""
    if "block_out_channels" in codec.config:
        return int(2 ** (len(codec.config["block_out_channels"]) - 1))
    if "scale_factor_spatial" in codec.config:
        return int(codec.config["scale_factor_spatial"])
    raise UnsupportedModelError(
        f"model: {type(codec).__name__} does not say how many pixels one latent position covers; take a "
        "pipeline whose codec is made for pictures"
    )


def _checkpoint_pipeline(path: str) -> Any:
    """The pipeline class that diffusers pairs with the architecture, which tensor names and shapes tell."""
    import diffusers
    from diffusers.loaders.single_file_utils import fetch_diffusers_config
    from safetensors import safe_open

    with safe_open(path, framework="pt") as weights:
        shapes = {key: weights.get_slice(key).get_shape() for key in weights.keys()}  # noqa: SIM118
    tensors = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    index = diffusers.DiffusionPipeline.load_config(**fetch_diffusers_config(tensors))
    return getattr(diffusers, index["_class_name"])


def _dtype_argument(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """``dtype`` under the name that the installed diffusers has for it: it was renamed in 0.40."""
    import diffusers

    major, minor = (int(number) for number in diffusers.__version__.split(".")[:2])
    return {"dtype" if (major, minor) >= (0, 40) else "torch_dtype": dtype}


@contextlib.contextmanager
def _loading(what: str) -> Iterator[None]:
    """Turn the many errors of an unreadable model into one line that names it."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"model: cannot load {what}: {(reason or type(error).__name__).rstrip('.')}; "
            "give a folder that holds all its files, or a hub id while the hub can be reached"
        ) from error
