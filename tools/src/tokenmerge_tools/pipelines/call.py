"""Repeatable calls of a diffusers pipeline: same prompt, seeds and size."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tokenmerge import report
from tokenmerge.errors import ConfigError, UnsupportedModelError
from tokenmerge_tools.pipelines.loading import (
    ModelSource,
    denoiser_of,
    denoising_models,
    guidance_in_force,
    guides,
    load_pipeline,
)
from tokenmerge_tools.pipelines.meta_model import default_size
from tokenmerge_tools.pipelines.options import GenerateOptions
from tokenmerge_tools.pipelines.settings import set_attention, set_scheduler

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from PIL.Image import Image


@dataclasses.dataclass(frozen=True)
class PipelineCall:
    """A repeatable call of a pipeline.

    ``arguments`` are the arguments of the pipeline, except for the generators. There is one seed per image
    or video. ``guided`` says whether classifier-free guidance doubles the batch. ``guidance`` is its scale: 1
    without guidance, None if the pipeline hides it.
    """

    arguments: Mapping[str, Any]
    seeds: tuple[int, ...]
    guided: bool
    guidance: float | None

    @classmethod
    def prepare(
        cls,
        pipe: DiffusionPipeline,
        options: GenerateOptions,
        size: tuple[int, int],
        control: Image | None = None,
        frames: int | None = None,
    ) -> PipelineCall:
        """Turn the options into arguments that the pipeline accepts.

        ``control`` is an image for the ControlNet, and ``frames`` the length of a video. If ``frames`` is
        None, the pipeline must draw images.
        """
        parameters = inspect.signature(pipe.__call__).parameters
        if frames is None and draws_videos(type(pipe)):
            raise UnsupportedModelError(
                f"model: {type(pipe).__name__} draws videos, but images were requested; only tokenmerge "
                "evaluate can draw videos, with a model from a diffusers folder or the hub"
            )
        arguments: dict[str, Any] = {
            "prompt": [options.prompt] * options.batch,
            "num_inference_steps": options.steps,
            "width": size[0],
            "height": size[1],
        }
        if frames is not None:
            arguments["num_frames"] = frames
        if options.guidance is not None:
            arguments["guidance_scale"] = options.guidance
        if options.negative_prompt is not None:
            arguments["negative_prompt"] = [options.negative_prompt] * options.batch
        if control is not None:
            name = "control_image" if "control_image" in parameters else "image"
            arguments[name] = [control.resize(size)] * options.batch
        pipeline = type(pipe).__name__
        unknown = [name for name in arguments if name not in parameters]
        if {"prompt", "width", "height"} & set(unknown):
            raise UnsupportedModelError(
                f"model: {pipeline} cannot generate images from text alone; use a text-to-image pipeline"
            )
        if unknown:
            raise ConfigError(f"{pipeline} does not accept {', '.join(unknown)}; leave it out")
        seeds = tuple(range(options.seed, options.seed + options.batch))
        scale = options.guidance
        return cls(arguments, seeds, guides(pipe, scale), guidance_in_force(pipe, scale))

    def of_pictures(self, prompts: Sequence[str], seeds: Sequence[int]) -> PipelineCall:
        """Return the same call with other prompts and seeds, one of each for every image."""
        return dataclasses.replace(
            self, arguments={**self.arguments, "prompt": list(prompts)}, seeds=tuple(seeds)
        )

    def with_steps(self, steps: int) -> PipelineCall:
        """Return the same call with another number of denoising steps."""
        return dataclasses.replace(self, arguments={**self.arguments, "num_inference_steps": steps})

    def as_latents(self) -> PipelineCall:
        """Return the same call, which returns the final latents instead of images."""
        return dataclasses.replace(self, arguments={**self.arguments, "output_type": "latent"})

    def __call__(self, pipe: DiffusionPipeline, on_step: Callable[[int], None] | None = None) -> list[Any]:
        """Generate one image per seed, or one video as a list of its frames.

        The pipeline is the one that the call was prepared for, or its :func:`twin`. ``on_step`` is called
        after each denoising step with the number of steps in this call.
        """
        arguments = {"output_type": "pil", **self.arguments}
        if on_step is not None and "callback_on_step_end" in inspect.signature(pipe.__call__).parameters:

            def step_done(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
                on_step(pipe.num_timesteps)
                return tensors

            arguments["callback_on_step_end"] = step_done
        # CPU generators make the noise independent of the device.
        generators = [torch.Generator("cpu").manual_seed(seed) for seed in self.seeds]
        made = pipe(**arguments, generator=generators)
        return list(made.frames if "num_frames" in self.arguments else made.images)


def load_pipeline_for(
    options: GenerateOptions, source: ModelSource, dtype: torch.dtype, device: torch.device
) -> DiffusionPipeline:
    """Load a pipeline with the ControlNet, scheduler and attention of the options, without progress bars."""
    pipe = load_pipeline(source, dtype, device, options.controlnet)
    if options.scheduler is not None:
        set_scheduler(pipe, options.scheduler)
    set_attention(list(denoising_models(pipe).values()), options.attention)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draws_videos(pipeline: Any) -> bool:
    """Return whether pipelines of this class draw videos whose length can be chosen."""
    length = inspect.signature(pipeline.__call__).parameters.get("num_frames")
    return length is not None and length.default != 1  # with 1, it draws images by default


def default_frames(pipeline: Any) -> int:
    """Return the default length of the videos that pipelines of this class draw."""
    default = inspect.signature(pipeline.__call__).parameters["num_frames"].default
    if not isinstance(default, int):
        raise ConfigError(f"frames: {pipeline.__name__} has no default length; give --frames")
    return default


def latent_scale(pipe: DiffusionPipeline) -> int:
    """Return the pixels per latent position along each side, or 1 if the pipeline does not tell."""
    return report.latent_scale(pipe) or 1


def own_size(pipe: DiffusionPipeline) -> tuple[int, int]:
    """Return the model's default (width, height) in pixels."""
    config = dict(denoiser_of(pipe).config)
    if getattr(pipe, "default_sample_size", None):
        config["sample_size"] = pipe.default_sample_size
    size = default_size(config, latent_scale(pipe))
    if size is None:
        raise ConfigError("size: this model has no default size; give --size")
    return size
