"""What is read from pipelines of other kinds: guiders of modular pipelines, and a second scheduler."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import diffusers
import hosts
import pytest
import torch
from diffusers import (
    DDIMInverseScheduler,
    DDIMScheduler,
    EulerAncestralDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    StableDiffusionDiffEditPipeline,
    UniPCMultistepScheduler,
    guiders,
)
from PIL import Image
from tiny_pipeline import SIDE
from torch import Tensor

from tokenmerge import StepReuse, ToMeConfig, apply_token_merging
from tokenmerge.api import merge_in_hosts
from tokenmerge.default_method import settings_for
from tokenmerge.plans.generation import StepKind
from tokenmerge.runtime.patching.patch import state_of
from tokenmerge.runtime.steps.noise_levels import clips_pictures_alone
from tokenmerge.runtime.steps.pipeline import default_guidance, guidance_scale
from tokenmerge.runtime.steps.scheduler import adds_noise, next_schedule


class Modular:
    """Denoises as modular pipelines do: one call of the model for each batch that the guider prepares."""

    def __init__(self, guider: Any) -> None:
        self.unet, self.scheduler, self.guider = hosts.unet(), DDIMScheduler(), guider

    def __call__(self, steps: int) -> Any:
        self.scheduler.set_timesteps(steps)
        latents, text = torch.randn(1, 4, 16, 16), torch.randn(1, 7, hosts.TEXT)
        for index, timestep in enumerate(self.scheduler.timesteps):
            self.guider.set_state(step=index, num_inference_steps=steps, timestep=timestep)
            batches = self.guider.prepare_inputs({"encoder_hidden_states": (text, -text)})
            for batch in batches:
                self.guider.prepare_models(self.unet)
                given = batch.encoder_hidden_states
                batch.noise_pred = self.unet(latents, timestep, encoder_hidden_states=given).sample
                self.guider.cleanup_models(self.unet)
            latents = self.scheduler.step(self.guider(batches)[0], timestep, latents).prev_sample
        return latents


@pytest.mark.parametrize(
    ("scale", "settings", "found"),
    [
        (7.5, {}, 7.5),
        (4.0, {"use_original_formulation": True}, 5.0),
        (7.5, {"enabled": False}, 1.0),
        (7.5, {"start": 0.5}, 7.5),
    ],
)
@torch.no_grad()
def test_the_guider_of_a_modular_pipeline_says_how_strong_guidance_is(scale, settings, found):
    pipe = Modular(guiders.ClassifierFreeGuidance(guidance_scale=scale, **settings))
    patch = apply_token_merging(pipe, speedup=1.5)
    assert torch.isfinite(pipe(8)).all()
    assert state_of(pipe.unet).last_run.guidance == found
    assert patch.config == settings_for(pipe, 1.5, 16, 16, steps=8, guidance=found)
    pipe.guider = guiders.ClassifierFreeGuidance(guidance_scale=1.0)
    pipe(8)
    assert state_of(pipe.unet).last_run.guidance == 1.0


@pytest.mark.parametrize(
    ("name", "scheduler", "clean"),
    [
        ("StableDiffusion3Pipeline", FlowMatchEulerDiscreteScheduler(shift=3.0), True),
        ("FluxPipeline", FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), False),
        ("HunyuanVideoPipeline", FlowMatchEulerDiscreteScheduler(shift=3.0), False),
        ("StableDiffusion3Pipeline", FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), False),
        ("StableDiffusionPipeline", DDIMScheduler(), False),
        ("WanPipeline", UniPCMultistepScheduler(use_flow_sigmas=True, flow_shift=3.0), False),
    ],
)
def test_before_a_generation_the_schedule_is_known(name, scheduler, clean):
    """The last step of SD3 changes little. FLUX and HunyuanVideo set their own noise levels."""
    pipeline_class = getattr(diffusers, name)
    pipe = pipeline_class.__new__(pipeline_class)
    vars(pipe)["scheduler"] = scheduler
    before = scheduler.timesteps
    assert all(next_schedule(pipe, steps).ends_clean is clean for steps in (4, 20, 50))
    assert scheduler.timesteps is before


STOCHASTIC = {
    "CMStochasticIterativeScheduler",
    *("DDPMParallelScheduler", "DDPMScheduler", "UnCLIPScheduler"),
    *("EulerAncestralDiscreteScheduler", "KDPM2AncestralDiscreteScheduler", "LTXEulerAncestralRFScheduler"),
    *("FlowMatchLCMScheduler", "LCMScheduler", "TCDScheduler"),
    "SASolverScheduler",
}


# Some of diffusers use numpy as it was.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", [name for name in dir(diffusers) if name.endswith("Scheduler")])
def test_a_scheduler_that_adds_noise_is_known_by_its_steps(name):
    """The random numbers that others draw stay the same."""
    try:
        scheduler = getattr(diffusers, name)()
    except (ImportError, TypeError):
        pytest.skip("it needs a package or settings")
    state = torch.get_rng_state()
    assert adds_noise(scheduler) is (name in STOCHASTIC)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
        ("FlowMatchEulerDiscreteScheduler", {"stochastic_sampling": True}),
    ],
)
def test_some_schedulers_add_noise_by_a_setting(kind, settings):
    cls = getattr(diffusers, kind)
    assert adds_noise(cls(**settings))
    assert not adds_noise(cls())


class Draws(diffusers.DDIMScheduler):
    """A scheduler whose steps draw random numbers without a generator."""

    def step(self, model_output: Any, timestep: Any, sample: Any, **_: Any) -> tuple[Tensor]:
        return (sample + torch.randn(sample.shape),)


def test_asking_a_scheduler_leaves_the_random_numbers_as_they_were():
    state = torch.get_rng_state()
    assert adds_noise(Draws())
    clips_pictures_alone(Draws())  # with clip_sample, as by default
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_no_scheduler_adds_no_noise():
    assert not adds_noise(None)
    assert not adds_noise(SimpleNamespace(config={}))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_generation_knows_that_its_solver_adds_noise(pipe):
    """Also where the scheduler was changed after token merging was applied."""
    patch = apply_token_merging(pipe, speedup=1.5)
    for solver, noisy in ((EulerAncestralDiscreteScheduler, True), (DDIMScheduler, False)):
        pipe.scheduler = solver.from_config(pipe.scheduler.config)
        pipe("", num_inference_steps=12, height=SIDE, width=SIDE, output_type="latent")
        assert state_of(pipe.unet).last_run.schedule.adds_noise is noisy
        assert patch._facts_at(None, None, 12).schedule.adds_noise is noisy


OTHER = {
    "FrequencyDecoupledGuidance": {"guidance_scales": [9.0, 5.0]},
    "AutoGuidance": {"guidance_scale": 9.0, "auto_guidance_layers": [0], "dropout": 0.1},
    "SkipLayerGuidance": {"guidance_scale": 9.0, "skip_layer_guidance_layers": [0]},
    "PerturbedAttentionGuidance": {"guidance_scale": 9.0, "perturbed_guidance_layers": [0]},
    "SmoothedEnergyGuidance": {"guidance_scale": 9.0, "seg_guidance_layers": [0]},
}


@pytest.mark.parametrize("name", [name for name in dir(guiders) if name.endswith("Guidance")])
def test_every_guider_has_a_scale(name):
    if name == "BaseGuidance":
        return
    if name == "FrequencyDecoupledGuidance":
        pytest.importorskip("kornia")
    guider = getattr(guiders, name)(**OTHER.get(name, {"guidance_scale": 9.0}))
    assert guidance_scale(Modular(guider)) == 9.0
    guider.disable()
    assert guidance_scale(Modular(guider)) == 1.0


def test_several_scales_count_as_the_highest():
    guider = SimpleNamespace(guidance_scales=[9.0, 5.0], _enabled=True, use_original_formulation=False)
    assert guidance_scale(Modular(guider)) == 9.0


@pytest.fixture
def editing(pipe: Any) -> Any:
    parts = {name: part for name, part in pipe.components.items() if name != "image_encoder"}
    inverse = DDIMInverseScheduler.from_config(pipe.scheduler.config)
    made = StableDiffusionDiffEditPipeline(**parts, inverse_scheduler=inverse, requires_safety_checker=False)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_steps_of_an_inverse_scheduler_are_reused(editing):
    """It turns an image into noise before the other half of the pipeline edits it."""
    kinds = {StepKind.FULL: 5, StepKind.SHALLOW: 3}
    picture = Image.new("RGB", (SIDE, SIDE), (200, 30, 60))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        config = ToMeConfig(ratio=0.5, reuse=StepReuse(every=2))
        merge_in_hosts(editing, config, check_size=False)
        noise = editing.invert(
            prompt="a cat", image=picture, num_inference_steps=8, inpaint_strength=1.0
        ).latents
        assert state_of(editing.unet).last_run.kinds == kinds
        mask = torch.ones(1, SIDE // 2, SIDE // 2)
        editing(
            prompt="a dog",
            mask_image=mask,
            image_latents=noise,
            num_inference_steps=8,
            inpaint_strength=1.0,
            output_type="latent",
        )
    assert state_of(editing.unet).last_run.kinds == kinds


@pytest.mark.parametrize(("cls", "scale"), [("FluxPipeline", 1.0), ("QwenImagePipeline", 4.0)])
def test_pipelines_whose_model_gets_a_scale_have_that_of_true_guidance(cls, scale):
    """Their ``guidance_scale`` is an input of the model, and compares no results."""
    pipe = object.__new__(getattr(diffusers, cls))
    assert guidance_scale(pipe) == default_guidance(pipe) == scale
