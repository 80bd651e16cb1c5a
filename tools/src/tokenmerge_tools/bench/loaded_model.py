"""Loads the model of a benchmark, once for all cells that share its dtype and scope."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tokenmerge.errors import ConfigError
from tokenmerge.models.base import is_a
from tokenmerge_tools.bench.geometry import (
    PREFIX,
    build_denoiser,
    build_pipeline,
    depth_note,
    find_geometry,
)
from tokenmerge_tools.bench.inputs import InputSize, example_inputs
from tokenmerge_tools.pipelines.loading import (
    denoiser_name,
    denoiser_of,
    find_model,
    guidance_in_force,
    guides,
    load_pipeline,
)
from tokenmerge_tools.pipelines.meta_model import load_sketch
from tokenmerge_tools.pipelines.settings import set_scheduler

_WITH_FRAMES = "WanTransformer3DModel"
_PROMPT = "a red apple"
_PROMPT_TOKENS = 77


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
    """A loaded model. Variants are applied to copies of its denoiser.

    ``whole`` makes a pipeline with such a copy, or returns the copy if it is called ``alone``. ``bind`` makes
    the function to time from that, a size and a number of steps. ``scale`` is the number of pixels per latent
    position along each side. ``guided`` says whether classifier-free guidance doubles the batch.
    """

    denoiser: nn.Module
    alone: bool
    whole: Callable[[nn.Module], Any]
    bind: Callable[[Any, InputSize, int], Callable[[], object]]
    scale: int
    guided: bool
    guidance: float | None
    notes: tuple[str, ...]


def find_info(model: str) -> ModelInfo:
    """Read a model's config files without loading its weights.

    The model is ``geometry:NAME``, a bundled model, a diffusers folder or a hub id.
    """
    if model.startswith(PREFIX):
        geometry = find_geometry(model)
        return ModelInfo(geometry.size, geometry.multiple, video=geometry.denoiser.startswith("Wan"))
    sketch = load_sketch(find_model(model))
    return ModelInfo(sketch.size, sketch.scale, video=is_a(sketch.denoiser, _WITH_FRAMES))


def load_model(
    model: str,
    scope: str,
    dtype: torch.dtype,
    device: torch.device,
    scheduler: str | None,
    guidance: float | None,
    seed: int,
) -> LoadedModel:
    """Load a model, or build it from its geometry.

    ``model`` is as for :func:`find_info`. ``seed`` is used for random weights and inputs. A scheduler or
    guidance scale of None means the model's default.
    """
    notes: list[str] = []
    if model.startswith(PREFIX):
        geometry = find_geometry(model)
        notes += ["random weights", *filter(None, [depth_note(model)])]
        guided = geometry.guided and (guidance is None or guidance > 1)
        if scope == "denoiser":
            denoiser = build_denoiser(geometry, dtype, device, seed)
            return _denoiser_alone(denoiser, 8, guided, seed, notes)
        pipe = build_pipeline(geometry, dtype, device, seed)
        notes.append("without the text encoders: the pipeline is given prompt embeddings")
    else:
        pipe = load_pipeline(find_model(model), dtype, device)
        guided = guides(pipe, guidance)
    denoiser = denoiser_of(pipe)
    scale = int(getattr(pipe, "vae_scale_factor", 1))
    if scope == "denoiser":
        return _denoiser_alone(denoiser, scale, guided, seed, notes)
    if scheduler is not None:
        set_scheduler(pipe, scheduler)
    pipe.set_progress_bar_config(disable=True)
    call = _PipelineCall(pipe, guidance, seed)
    in_force = guidance_in_force(pipe, guidance)
    return LoadedModel(denoiser, False, call.whole, call, scale, guided, in_force, tuple(notes))


def _denoiser_alone(
    denoiser: nn.Module, scale: int, guided: bool, seed: int, notes: list[str]
) -> LoadedModel:
    def bind(model: nn.Module, size: InputSize, steps: int) -> Callable[[], object]:
        inputs = example_inputs(denoiser, size, seed, guided)

        def call() -> object:
            # Each call gets new tensors, as in a generation. Calls with the same sample tensor share plans.
            args, kwargs = tree_map_only(Tensor, torch.clone, (inputs.args, inputs.kwargs))
            with torch.no_grad():
                return model(*args, **kwargs)

        return call

    return LoadedModel(denoiser, True, lambda model: model, bind, scale, guided, None, tuple(notes))


class _PipelineCall:
    """Makes calls of a pipeline with a fixed prompt, seed and size."""

    def __init__(self, pipe: Any, guidance: float | None, seed: int) -> None:
        self.pipe, self.guidance, self.seed = pipe, guidance, seed

    def whole(self, model: nn.Module) -> Any:
        pipe = copy.copy(self.pipe)
        setattr(pipe, denoiser_name(pipe), model)
        return pipe

    def __call__(self, pipe: Any, size: InputSize, steps: int) -> Callable[[], object]:
        parameters = inspect.signature(pipe.__call__).parameters
        if not {"prompt", "width", "height", "num_inference_steps"} <= set(parameters):
            raise ConfigError(
                f"scope: {type(pipe).__name__} is not a text-to-image pipeline; use --scope denoiser"
            )
        images = size.samples
        arguments: dict[str, Any] = {
            "num_inference_steps": steps,
            "width": size.width,
            "height": size.height,
            # Converting the output of random weights to 8 bits would give a warning.
            "output_type": "pt",
            **(self._embeddings(images) if pipe.tokenizer is None else {"prompt": [_PROMPT] * images}),
        }
        if is_a(denoiser_of(self.pipe), _WITH_FRAMES):
            arguments["num_frames"] = size.frames
        if self.guidance is not None:
            if "guidance_scale" not in parameters:
                raise ConfigError(
                    f"guidance: {type(pipe).__name__} has no guidance scale; leave --guidance out"
                )
            arguments["guidance_scale"] = self.guidance

        def call() -> object:
            generators = [torch.Generator("cpu").manual_seed(self.seed + i) for i in range(images)]
            return pipe(**arguments, generator=generators)

        return call

    def _embeddings(self, images: int) -> dict[str, Any]:
        """Random embeddings in place of those of a prompt and of the empty prompt."""
        unet, config = self.pipe.unet, self.pipe.unet.config
        generator = torch.Generator("cpu").manual_seed(self.seed)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(images, *shape, generator=generator).to(unet.device, unet.dtype)

        width = config.cross_attention_dim
        names = ["prompt_embeds", "negative_prompt_embeds"]
        embeddings = {name: noise(_PROMPT_TOKENS, width) for name in names}
        if config.addition_embed_type == "text_time":
            pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
            embeddings |= {name.replace("prompt", "pooled_prompt"): noise(pooled) for name in names}
        return embeddings
