"""Turns the value of ``--model`` into a diffusers pipeline, or into its denoiser without weights."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import gc
import inspect
import logging
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tokenmerge.errors import ConfigError, MissingExtraError, UnsupportedModelError
from tokenmerge_tools import demo
from tokenmerge_tools.failures import errors_as
from tokenmerge_tools.files import is_file, is_folder

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

DEFAULT_MODEL = demo.NAMES[0]
PICKLE = "pickle:"
_DENOISING = ("unet", "transformer", "controlnet")

# Well-known models by name.
HUB_IDS = {
    "flux.1-dev": "black-forest-labs/FLUX.1-dev",
    "qwen-image": "Qwen/Qwen-Image",
    "sd3.5": "stabilityai/stable-diffusion-3.5-large",
    "sdxl": "stabilityai/stable-diffusion-xl-base-1.0",
    "wan": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
}
DENOISERS = ("unet", "transformer")
ABSENT = [None, None]  # the entry in model_index.json of a component that the pipeline does not have
_PICKLES = (".ckpt", ".pt", ".pth", ".bin")
# Errors of the network, of huggingface_hub, requests and httpx.
_UNREACHABLE = {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "ConnectError"}
_LONGEST_NAME = 200
_HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")  # the hub allows no longer names
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
    """Where to load a model from.

    By default only safetensors are read, because a pickle can run code when it is loaded.
    """

    kind: SourceKind
    location: str
    allows_pickles: bool = False

    def weights_arguments(self) -> dict[str, bool]:
        """Return the arguments of diffusers' ``from_pretrained`` that enforce this choice."""
        return {} if self.allows_pickles else {"use_safetensors": True}


def find_model(name: str) -> ModelSource:
    """Find the model with this name. This reads directories, but no weights.

    The name is a bundled model, a diffusers folder, a ``.safetensors`` file, a hub id or one of
    :data:`HUB_IDS`. After the prefix ``pickle:``, weights in pickles (``.ckpt``, ``.pt``, ``.pth``, ``.bin``)
    are accepted too.
    """
    location = name.removeprefix(PICKLE)
    allows_pickles = location != name
    path = Path(location)
    with contextlib.suppress(RuntimeError):  # "~name" may name an unknown user
        path = path.expanduser()
    if location in demo.NAMES:
        return ModelSource(SourceKind.DEMO, str(demo.path(location)))
    if location.lower() in HUB_IDS and not is_folder(path):
        return ModelSource(SourceKind.HUB, HUB_IDS[location.lower()], allows_pickles)
    if location and is_folder(path):
        if not (path / "model_index.json").is_file():
            raise ConfigError(
                f"model: the folder {location} has no model_index.json; give the folder that "
                "pipe.save_pretrained() wrote, not one of its subfolders"
            )
        if not allows_pickles:
            _refuse_pickles(path, [component for component in path.iterdir() if component.is_dir()])
        return ModelSource(SourceKind.FOLDER, str(path), allows_pickles)
    if path.suffix in _PICKLES and not allows_pickles:
        raise _pickle_error(f"{_short(location)} is a pickle", _short(location))
    if path.suffix in (".safetensors", *_PICKLES):
        if not is_file(path):
            raise ConfigError(f"model: there is no file {_short(location)}")
        return ModelSource(SourceKind.CHECKPOINT, str(path), allows_pickles)
    if _HUB_ID.fullmatch(location) and not location.startswith("."):
        return ModelSource(SourceKind.HUB, location, allows_pickles)
    if "/" in location.strip("/") or location.startswith((".", "/", "~")):
        raise ConfigError(f"model: there is no folder {_short(location)}; expected {_ACCEPTED}")
    raise ConfigError(f"model: {_short(name)!r} is not a model; expected {_ACCEPTED}")


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}…"


def _refuse_pickles(folder: Path, components: Iterable[Path]) -> None:
    """Raise a ConfigError if one of these folders has weights only as pickles."""
    for component in sorted(components):
        files = sorted(component.iterdir())
        pickles = [file for file in files if file.suffix in _PICKLES]
        if pickles and not any(file.suffix == ".safetensors" for file in files):
            raise _pickle_error(f"{pickles[0].relative_to(folder)} in {folder} is a pickle", str(folder))


def _pickle_error(what: str, location: str) -> ConfigError:
    return ConfigError(
        f"model: {what}, which can run code when it is loaded; convert it to .safetensors, or give "
        f"{PICKLE}{location} if you trust where it comes from"
    )


def load_pipeline(
    source: ModelSource, dtype: torch.dtype, device: torch.device, controlnet: str | None = None
) -> DiffusionPipeline:
    """Load a text-to-image pipeline with its weights.

    ``controlnet`` is the folder or hub id of a ControlNet to add.
    """
    diffusers = require_diffusers("loading a diffusers model")
    arguments: dict[str, Any] = _dtype_argument(dtype)
    with loading(source.location):
        if source.kind is SourceKind.CHECKPOINT:
            pipe = _checkpoint_pipeline(source).from_single_file(source.location, **arguments)
        else:
            # A component saved as absent, such as T5 in Stable Diffusion 3, must still be passed as None.
            absent = {part: None for part, found in read_index(source).items() if found == ABSENT}
            arguments |= source.weights_arguments()
            pipe = diffusers.DiffusionPipeline.from_pretrained(source.location, **absent, **arguments)
    denoiser_name(pipe)
    if controlnet is not None:
        location = controlnet.removeprefix(PICKLE)
        kind = SourceKind.FOLDER if is_folder(Path(location)) else SourceKind.HUB
        extra_source = ModelSource(kind, location, allows_pickles=location != controlnet)
        if kind is SourceKind.FOLDER and not extra_source.allows_pickles:
            _refuse_pickles(Path(location), [Path(location)])
        with loading(location):
            config = diffusers.ControlNetModel.load_config(location)
            controlnet_class = getattr(diffusers, config["_class_name"])
            arguments = {**_dtype_argument(dtype), **extra_source.weights_arguments()}
            extra = controlnet_class.from_pretrained(location, **arguments)
            pipe = diffusers.AutoPipelineForText2Image.from_pipe(pipe, controlnet=extra)
    if getattr(pipe, "scheduler", None) is None:
        raise ConfigError(
            f"model: {source.location} has no scheduler; give a folder with all files of the model"
        )
    with loading(source.location):
        return pipe.to(device)


def denoiser_name(pipe: DiffusionPipeline) -> str:
    """Return the name of the pipeline's denoiser: ``"unet"`` or ``"transformer"``."""
    for name in DENOISERS:
        if getattr(pipe, name, None) is not None:
            return name
    raise UnsupportedModelError(no_denoiser(type(pipe).__name__))


def denoiser_of(pipe: DiffusionPipeline) -> Any:
    """Return the pipeline's denoiser."""
    return getattr(pipe, denoiser_name(pipe))


def guides(pipe: DiffusionPipeline, scale: float | None) -> bool:
    """Return whether a pipeline applies classifier-free guidance at this scale.

    A scale of None is the pipeline's default. Models distilled from guided ones take the scale as an input,
    and do not double the batch.
    """
    if denoiser_of(pipe).config.get("guidance_embeds"):
        return False
    scale = _given_or_default(pipe, scale)
    return scale is not None and scale > 1


def guidance_in_force(pipe: DiffusionPipeline, scale: float | None) -> float | None:
    """Return the scale that decides which rules of a config hold, or None if the pipeline hides it.

    It is 1 where a pipeline applies no classifier-free guidance. A scale of None is the pipeline's default.
    """
    if not hasattr(type(pipe), "do_classifier_free_guidance"):
        return None
    return _given_or_default(pipe, scale) if guides(pipe, scale) else 1.0


def _given_or_default(pipe: DiffusionPipeline, scale: float | None) -> float | None:
    if scale is not None:
        return scale
    parameter = inspect.signature(pipe.__call__).parameters.get("guidance_scale")
    return None if parameter is None else parameter.default


def require_diffusers(needed_by: str) -> Any:
    """Import diffusers, or raise a MissingExtraError that says how to install it."""
    try:
        import diffusers
    except ImportError as error:
        raise MissingExtraError("diffusers", f"{needed_by} needs diffusers") from error
    return diffusers


def no_denoiser(pipeline: str) -> str:
    """Return the error message for a pipeline without a denoiser."""
    return f"model: {pipeline} has neither a unet nor a transformer; use a text-to-image diffusion pipeline"


def read_index(source: ModelSource) -> dict[str, Any]:
    """Read ``model_index.json``: [library, class] of each component, by its name."""
    import diffusers

    try:
        with loading(source.location):
            index = diffusers.DiffusionPipeline.load_config(source.location)
    except ConfigError as error:
        if source.kind is not SourceKind.HUB or not _UNREACHABLE & set(_causes(error)):
            raise
        raise ConfigError(
            f"model: cannot reach the hub to load {source.location}; check the network, or give a folder of "
            "this machine"
        ) from error
    if not isinstance(index, dict):
        raise ConfigError(
            f"model: model_index.json of {source.location} is not an object with the pipeline's components; "
            "give a folder that pipe.save_pretrained() wrote"
        )
    return index


def _causes(error: BaseException) -> Iterator[str]:
    """Yield the names of the classes of an error and of what caused it."""
    cause: BaseException | None = error
    while cause is not None:
        yield from (one.__name__ for one in type(cause).__mro__)
        cause = cause.__cause__ or cause.__context__


def _checkpoint_pipeline(source: ModelSource) -> Any:
    """Find the pipeline class of a checkpoint from the names and shapes of its tensors, as diffusers does."""
    import diffusers
    from diffusers.loaders.single_file_utils import fetch_diffusers_config
    from safetensors import safe_open

    if source.location.endswith(".safetensors"):
        with safe_open(source.location, framework="pt") as weights:
            shapes = {key: weights.get_slice(key).get_shape() for key in weights.keys()}  # noqa: SIM118
        tensors = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    else:
        # With weights_only, as in diffusers, only tensors and plain containers are read, and no code runs.
        content = torch.load(source.location, map_location="meta", weights_only=True)
        tensors = content.get("state_dict", content)
    index = diffusers.DiffusionPipeline.load_config(**fetch_diffusers_config(tensors))
    return getattr(diffusers, index["_class_name"])


def _dtype_argument(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the argument for the dtype, which diffusers 0.40 renamed."""
    import diffusers

    major, minor = (int(number) for number in diffusers.__version__.split(".")[:2])
    return {"dtype" if (major, minor) >= (0, 40) else "torch_dtype": dtype}


def loading(what: str) -> contextlib.AbstractContextManager[None]:
    """Turn any error from loading a damaged or unknown model into one line that names the model."""

    def error_of(reason: str) -> ConfigError:
        return ConfigError(
            f"model: cannot load {what}: {reason}; give a folder with all files of the model as safetensors "
            f"({PICKLE}NAME accepts pickles too), or a hub id while the hub can be reached"
        )

    return errors_as(error_of)


def twin(pipe: DiffusionPipeline) -> DiffusionPipeline:
    """Copy a pipeline with the modules of its denoiser and ControlNets, sharing weights and other components.

    Patching or compiling one pipeline does not affect the other, so their calls can be interleaved.
    """
    other = copy.copy(pipe)
    for name, model in denoising_models(pipe).items():
        setattr(other, name, shared_copy(model))
    return other


def shared_copy(model: nn.Module) -> nn.Module:
    """Copy the modules of a model, but share its weights."""
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, shared)


def denoising_models(pipe: DiffusionPipeline) -> dict[str, nn.Module]:
    """Return the models that run at each denoising step, by the component's name."""
    found = {name: getattr(pipe, name, None) for name in _DENOISING}
    return {name: model for name, model in found.items() if isinstance(model, nn.Module)}


def free_memory() -> None:
    """Free unused memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def quiet_loggers(*prefixes: str) -> Iterator[None]:
    """Silence the loggers whose names begin with a prefix, except for errors."""
    known = {*prefixes, *(name for name in logging.root.manager.loggerDict if name.startswith(prefixes))}
    before = {logger: logger.level for logger in map(logging.getLogger, known)}
    for logger in before:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in before.items():
            logger.setLevel(level)


def quiet_libraries(command: str) -> None:
    """Turn off progress bars of other libraries, and their warnings about parts that no command uses.

    If diffusers is missing, the error names the command.
    """
    # diffusers imports torchao if it is installed, and torchao warns about kernels that cannot run here.
    for name in ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer"):
        logging.getLogger(name).setLevel(logging.ERROR)
    require_diffusers(command)
    import diffusers.utils.logging
    import transformers.utils.logging

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    # A pipeline warns if its VAE has another class than the saved one, although any class that fits works.
    logging.getLogger("diffusers.pipelines.pipeline_utils").setLevel(logging.ERROR)
