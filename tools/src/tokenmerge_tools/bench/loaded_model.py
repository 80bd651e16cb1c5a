"""Loads the model of a benchmark, once for all cells that share its dtype and scope."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tokenmerge.models.base import is_a
from tokenmerge_tools.bench.geometry import (
    PREFIX,
    build_denoiser,
    build_pipeline,
    depth_note,
    find_geometry,
)
from tokenmerge_tools.bench.inputs import InputSize, example_inputs
from tokenmerge_tools.pipelines.call import PipelineCall
from tokenmerge_tools.pipelines.loading import (
    denoiser_name,
    denoiser_of,
    find_model,
    guidance_in_force,
    guides,
    load_pipeline,
)
from tokenmerge_tools.pipelines.meta_model import load_sketch
from tokenmerge_tools.pipelines.options import GenerateOptions
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
    return _whole_pipeline(pipe, scale, guided, guidance, seed, notes)


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


def _whole_pipeline(
    pipe: Any, scale: int, guided: bool, guidance: float | None, seed: int, notes: list[str]
) -> LoadedModel:
    def whole(model: nn.Module) -> Any:
        copied = copy.copy(pipe)
        setattr(copied, denoiser_name(copied), model)
        return copied

    def bind(copied: Any, size: InputSize, steps: int) -> Callable[[], object]:
        options = GenerateOptions(
            prompt=_PROMPT, steps=steps, batch=size.samples, guidance=guidance, seed=seed
        )
        frames = size.frames if is_a(denoiser_of(pipe), _WITH_FRAMES) else None
        prepared = PipelineCall.prepare(copied, options, (size.width, size.height), frames=frames)
        # Converting the output of random weights to 8 bits would give a warning.
        arguments = {**prepared.arguments, "output_type": "pt"}
        if pipe.tokenizer is None:
            del arguments["prompt"]
            arguments |= _embeddings(pipe.unet, size.samples, seed)
        return partial(dataclasses.replace(prepared, arguments=arguments), copied)

    in_force = guidance_in_force(pipe, guidance)
    return LoadedModel(denoiser_of(pipe), False, whole, bind, scale, guided, in_force, tuple(notes))


def _embeddings(unet: Any, images: int, seed: int) -> dict[str, Any]:
    """Draw random embeddings in place of those of a prompt and of the empty prompt."""
    config, generator = unet.config, torch.Generator("cpu").manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(images, *shape, generator=generator).to(unet.device, unet.dtype)

    names = ["prompt_embeds", "negative_prompt_embeds"]
    embeddings = {name: noise(_PROMPT_TOKENS, config.cross_attention_dim) for name in names}
    if config.addition_embed_type == "text_time":
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        embeddings |= {name.replace("prompt", "pooled_prompt"): noise(pooled) for name in names}
    return embeddings
