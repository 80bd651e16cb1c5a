"""Denoisers with random weights, and the denoising loops of their pipelines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from on_gpu.record import Facts, Run

# What makes a model small: the arguments of its class in diffusers that differ from those of its geometry.
_UNET = {"layers_per_block": 1, "cross_attention_dim": 16, "attention_head_dim": 2}
TINY: dict[str, Facts] = {
    "sd15": {
        **_UNET,
        "block_out_channels": (32, 64),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    },
    "sdxl": {
        **_UNET,
        "block_out_channels": (32, 64),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": 1,
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 64,
    },
    "sd3": {
        "num_layers": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "caption_projection_dim": 32,
        "joint_attention_dim": 16,
        "pooled_projection_dim": 16,
    },
    "flux": {
        "num_layers": 1,
        "num_single_layers": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "joint_attention_dim": 16,
        "pooled_projection_dim": 16,
        "axes_dims_rope": (4, 4, 8),
    },
    "wan": {
        "num_layers": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "ffn_dim": 32,
        "text_dim": 16,
    },
}
TINY_SIDE = 128  # pixels
TINY_FRAMES = 5
TINY_STEPS = 5
# The video model has fewer steps than usual: 50 would take minutes.
STEPS = {"sd15": 20, "sdxl": 30, "sd3": 28, "flux": 28, "wan": 12}
# The guidance scales that the pipelines take by themselves. That of FLUX.1 is an input of the model.
GUIDANCE = {"sd15": 7.5, "sdxl": 5.0, "sd3": 7.0, "flux": 3.5, "wan": 5.0}
# The number of steps of a generation whose single steps are timed.
STEPS_OF_SINGLE = 28


def build(run: Run, name: str, dtype: torch.dtype, **changes: Any) -> Any:
    """Return a denoiser with random weights, made on the device."""
    from tokenmerge_tools.bench.loaded_model import GEOMETRIES, build_denoiser

    geometry = GEOMETRIES[name]
    config = {**geometry.config, **changes, **(TINY[name] if run.tiny else {})}
    model = build_denoiser(dataclasses.replace(geometry, config=config), dtype, run.device, seed=0)
    return model.requires_grad_(False)


def scheduler_of(name: str, tokens: int, height: int) -> tuple[Any, dict[str, Any]]:
    """Return the scheduler that a model is published with, and what its ``set_timesteps`` takes besides."""
    import diffusers

    trained: dict[str, Any] = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    if name == "sd15":
        return diffusers.PNDMScheduler(**trained, skip_prk_steps=True, steps_offset=1), {}
    if name == "sdxl":
        return diffusers.EulerDiscreteScheduler(**trained, steps_offset=1, timestep_spacing="leading"), {}
    if name == "wan":
        shift = 5.0 if height >= 720 else 3.0
        flow = diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
        )
        return flow, {}
    if name == "sd3":
        return diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), {}
    # FLUX.1 shifts its noise levels by the number of tokens, linearly from 256 to 4096.
    few, many = 256, 4096
    least, most = 0.5, 1.15
    mu = least + (most - least) * (tokens - few) / (many - few)
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True), {"mu": mu}


def quiet_scheduler(name: str) -> tuple[Any, dict[str, Any]]:
    """Return a scheduler that does not wait for the device, so that only token merging could."""
    import diffusers

    if name in ("sd15", "sdxl"):
        return scheduler_of("sdxl", 0, 0)
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), {}


class Loop:
    """The denoising loop of a pipeline, without its text encoder and its decoder.

    The guidance scale and the scheduler are those that the pipeline takes by itself. A video model gets both
    halves of guidance in one batch.
    """

    def __init__(
        self,
        run: Run,
        name: str,
        model: Any,
        height: int,
        width: int,
        frames: int = 1,
        batch: int = 1,
        quiet: bool = False,
    ) -> None:
        from tokenmerge_tools.bench.loaded_model import example_inputs

        is_unet = hasattr(model, "down_blocks")
        setattr(self, "unet" if is_unet else "transformer", model)
        self.model = model
        self.name = name
        self.is_unet = is_unet
        self.steps = TINY_STEPS if run.tiny else STEPS[name]
        # How many steps run before one that is timed by itself. A transformer's first step may be dense, and
        # its second is the first that merges.
        self.steps_before = 1 if is_unet else 2
        self.do_classifier_free_guidance = name != "flux"
        self.guidance_scale = GUIDANCE[name]
        self.copies = 2 if self.do_classifier_free_guidance else 1
        args, self.inputs = example_inputs(
            model,
            (height // 8, width // 8),
            batch * self.copies,
            guided=self.copies == 2,
            frames=frames,
        )
        sample = args[0] if args else self.inputs.pop("hidden_states")
        del self.inputs["timestep"]
        self.noise = sample[:batch].clone()
        tokens = (height // 16) * (width // 16)
        self.scheduler, self.of_schedule = (
            quiet_scheduler(name) if quiet else scheduler_of(name, tokens, height)
        )
        # On the device, since copying a number there would wait for it.
        self._timesteps = torch.linspace(999, 1, STEPS_OF_SINGLE, device=self.noise.device)

    def call(self, latents: Tensor, t: Tensor) -> Tensor:
        """Call the model once, as pipelines do."""
        sample = torch.cat([latents] * self.copies)
        if self.is_unet:
            return self.model(sample, t, **self.inputs, return_dict=False)[0]
        timestep = t.expand(len(sample)).to(sample.dtype) / (1000 if self.name == "flux" else 1)
        return self.model(hidden_states=sample, timestep=timestep, **self.inputs, return_dict=False)[0]

    def step(self, index: int) -> Tensor:
        """Call the model as in one step of a generation, on noise."""
        return self.call(self.noise, self._timesteps[index])

    def __call__(
        self,
        until: int | None = None,
        noted: Callable[[int], object] | None = None,
        steps: int | None = None,
    ) -> Tensor:
        """Denoise, all steps or the first of them; ``noted`` is called before each step."""
        self.scheduler.set_timesteps(steps or self.steps, device=self.noise.device, **self.of_schedule)
        latents = self.noise * (float(self.scheduler.init_noise_sigma) if self.is_unet else 1)
        for index, t in enumerate(self.scheduler.timesteps[:until]):
            if noted is not None:
                noted(index)
            given = self.scheduler.scale_model_input(latents, t) if self.is_unet else latents
            noise = self.call(given.to(self.noise.dtype), t)
            if self.copies == 2:
                without, with_text = noise.chunk(2)
                noise = without + self.guidance_scale * (with_text - without)
            latents = self.scheduler.step(noise, t, latents, return_dict=False)[0].to(self.noise.dtype)
        return latents
