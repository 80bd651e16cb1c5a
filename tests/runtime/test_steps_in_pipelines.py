"""Settings that follow the steps in real pipelines: which calls are dense, merge, correct or do not run."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import cached
import pytest
import torch
from diffusers import (
    AutoencoderKLWan,
    DDIMScheduler,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    PNDMScheduler,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPipeline,
    UniPCMultistepScheduler,
    WanPipeline,
)
from PIL import Image
from tests.models.family import TEXT, WORDS
from tests.models.test_every_family import model_of
from tests.models.tiny import FAMILIES
from tiny_pipeline import SIDE
from torch import nn

from tokenmerge import Correction, StepReuse, ToMeConfig, apply_token_merging
from tokenmerge.config import dense_outside
from tokenmerge.plans.generation import Merging
from tokenmerge.runtime.memory.state import BlockState, LayerState
from tokenmerge.runtime.patching.patch import state_of

# Schedulers' arithmetic on numpy's arrays.
pytestmark = pytest.mark.filterwarnings("ignore:__array_(_ implementation|wrap__):DeprecationWarning")

CORRECTED: dict[str, Any] = {
    "ratio": 0.5,
    "max_downsample": 2,
    "scope": "block",
    "correction": Correction(every=3),
}
REUSED: dict[str, Any] = {"ratio": 0.5, "max_downsample": 2, "reuse": StepReuse(every=2)}


def draw(pipe: DiffusionPipeline, steps: int, **arguments: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    size = {"height": SIDE, "width": SIDE} if not isinstance(pipe, StableDiffusionImg2ImgPipeline) else {}
    given = {"output_type": "latent", "generator": generator, **size, **arguments}
    return pipe(**{"prompt": "a cat", **given}, num_inference_steps=steps).images


def calls(model: nn.Module) -> list[tuple[int, int, str]]:
    """Filled as the model is called: index of the step, number of the call in it, what it does."""
    state, seen = state_of(model), []

    def note(*_: Any) -> None:
        context = state.context
        what = {Merging.MERGES: "merges", Merging.MEASURES: "corrects", Merging.DENSE: "dense"}
        reuses = context.decision.merging is Merging.MERGES and context.decision.deep is not None
        index = state.threads.value.memory.tracker.index
        seen.append((index, context.call, "reuses" if reuses else what[context.decision.merging]))

    model.register_forward_pre_hook(note)
    return seen


def kept(model: nn.Module) -> int:
    gc.collect()
    merging = [cache for _, cache in cached.caches(model, BlockState | LayerState)]
    kept = sum(len(cache.plans) + len(cache.residuals) for cache in merging)
    return kept + len(cached.memory_of(model).guidance_differences)


def whats(seen: list[tuple[int, int, str]]) -> str:
    """The first letter of each call."""
    return "".join(what[0] for _, _, what in seen)


OF_KINDS = (
    DDIMScheduler(steps_offset=1, clip_sample=False),
    EulerDiscreteScheduler(steps_offset=1),
    PNDMScheduler(steps_offset=1, skip_prk_steps=True),  # with a timestep that comes twice
    UniPCMultistepScheduler(steps_offset=1),
)
SCHEDULERS = pytest.mark.parametrize("scheduler", OF_KINDS, ids=lambda scheduler: type(scheduler).__name__)


@SCHEDULERS
def test_a_generation(pipe, scheduler):
    """Also with a scheduler that is swapped after the pipeline was patched."""
    apply_token_merging(pipe, ToMeConfig(**CORRECTED, rules=dense_outside(0, 0.8)))
    pipe.scheduler = scheduler
    seen = calls(pipe.unet)
    steps = 8 if isinstance(scheduler, PNDMScheduler) else 9
    for _ in range(2):
        seen.clear()
        draw(pipe, steps)
        assert seen == [(i, 0, what) for i, what in enumerate(["corrects", *["merges"] * 2] * 2)] + [
            (6, 0, "dense"),  # which no merged step would follow
            *((i, 0, "dense") for i in (7, 8)),
        ]
        assert not kept(pipe.unet)


@SCHEDULERS
def test_from_a_picture(pipe, scheduler):
    """Steps are counted from the one that it begins at."""
    pipe.scheduler = scheduler
    pipe = StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    apply_token_merging(pipe, ToMeConfig(**REUSED, rules=dense_outside(0, 0.75)))
    seen = calls(pipe.unet)
    picture = Image.new("RGB", (SIDE, SIDE), (200, 30, 60))
    draw(pipe, 16, image=picture, strength=0.5)
    assert whats(seen) == ("mmrmrrmdd" if isinstance(scheduler, PNDMScheduler) else "mmrmrmdd")
    assert not kept(pipe.unet)


def test_guidance_that_ends_halves_the_batch(pipe):
    def end(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 3:
            pipe._guidance_scale = 0.0
            tensors["prompt_embeds"] = tensors["prompt_embeds"][1:]
        return tensors

    apply_token_merging(pipe, ToMeConfig(**CORRECTED))
    seen = calls(pipe.unet)
    draw(pipe, 8, callback_on_step_end=end, callback_on_step_end_tensor_inputs=["prompt_embeds"])
    assert whats(seen) == "cmmccmmd"
    assert not kept(pipe.unet)


def test_what_is_cut_off_changes_nothing_of_the_next(pipe):
    def cut(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        pipe._interrupt = step == 1
        return tensors

    apply_token_merging(pipe, ToMeConfig(**CORRECTED))
    expected = draw(pipe, 4)
    draw(pipe, 4, callback_on_step_end=cut)
    assert kept(pipe.unet)
    assert torch.equal(draw(pipe, 4), expected)
    draw(pipe, 4, callback_on_step_end=cut, height=SIDE + 16, num_images_per_prompt=2)
    assert torch.equal(draw(pipe, 4), expected)


@pytest.mark.parametrize("settings", [CORRECTED, REUSED])
def test_a_generation_leaves_nothing_when_the_next_begins_whether_it_was_cut_off_or_not(pipe, settings):
    def cut(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        pipe._interrupt = step == 2
        return tensors

    apply_token_merging(pipe, ToMeConfig(**settings))
    memories = state_of(pipe.unet).memories
    gc.collect()
    gc.disable()  # what only the garbage collector finds may stay on a device for long
    try:
        seen = []
        for last in (None, cut, None, cut):
            draw(pipe, 4, callback_on_step_end=last)
            seen += [weakref.ref(memory) for memory in memories.values()]
        draw(pipe, 4)
        assert len(memories) == 1
        assert [one() for one in seen] == [None] * len(seen)
    finally:
        gc.enable()


@pytest.mark.parametrize("settings", [CORRECTED, REUSED])
def test_what_is_cut_off_changes_nothing_of_image_to_image_after_it(pipe, settings):
    """It begins at the very step that the other would have made next."""
    pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    from_picture = StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
    from_picture.set_progress_bar_config(disable=True)
    given = {"image": Image.new("RGB", (SIDE, SIDE), (200, 30, 60)), "strength": 0.5}

    def cut(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        pipe._interrupt = step == 3
        return tensors

    apply_token_merging(from_picture, ToMeConfig(**settings))
    expected = draw(from_picture, 8, **given)
    draw(pipe, 8, callback_on_step_end=cut)
    assert torch.equal(draw(from_picture, 8, **given), expected)


@pytest.mark.parametrize("settings", [CORRECTED, REUSED])
def test_nothing_is_kept_any_more_when_the_picture_is_decoded(pipe, settings):
    apply_token_merging(pipe, ToMeConfig(**settings))
    held = []

    def note(*_: Any) -> None:
        held.append(sum(len(cache.residuals) + len(cache.skippable) for _, cache in cached.caches(pipe.unet)))

    pipe.vae.decoder.register_forward_pre_hook(note)
    pipe.unet.register_forward_hook(note)
    draw(pipe, 4, output_type="np")
    assert held[-1] == 0
    assert all(held[:3])


def test_removal_in_the_middle(pipe):
    patch = apply_token_merging(pipe, ToMeConfig(**CORRECTED))
    memories = []

    def remove(*_: Any) -> dict[str, Any]:
        if state_of(pipe.unet) is not None:
            memories.append(cached.memory_of(pipe.unet))
            assert cached.everything(memories[0])
        patch.remove()
        return {}

    draw(pipe, 4, callback_on_step_end=remove)
    assert not cached.everything(memories[0])
    assert state_of(pipe.unet) is None


def test_another_pipeline_with_the_same_model_follows_its_own_scheduler(pipe):
    """It is found on the call stack, and need not be the one that token merging was applied to."""
    scheduler = DPMSolverMultistepScheduler.from_config(pipe.scheduler.config)
    components = {**pipe.components, "scheduler": scheduler}
    other = StableDiffusionPipeline(**components, requires_safety_checker=False)
    other.set_progress_bar_config(disable=True)
    apply_token_merging(other, ToMeConfig(**CORRECTED))
    expected = draw(other, 4)
    apply_token_merging(pipe, ToMeConfig(**CORRECTED))
    seen = calls(pipe.unet)
    assert torch.equal(draw(other, 4), expected)
    assert whats(seen) == "cmmd"


@pytest.mark.parametrize(
    ("settings", "first", "second"),
    [
        # The second transformer has nothing of the first; a share of the steps is one of both's.
        (
            {"scope": "block", "correction": Correction(every=3), "rules": dense_outside(0, 0.75)},
            "ccmmmmccmm",
            "dddddd",
        ),
        ({"reuse": StepReuse(every=2)}, "mmmmrrmmrr", "mmmmmm"),
        # Of the steps that run.
        (
            {"scope": "block", "correction": Correction(every=2), "reuse": StepReuse(every=2)},
            "ccmmrrccrr",
            "ccmmdd",
        ),
    ],
)
def test_two_transformers_and_a_call_for_each_prompt(settings, first, second):
    one, other = (model_of(FAMILIES["WanTransformer3DModel"]) for _ in range(2))
    codec = AutoencoderKLWan(
        base_dim=3, z_dim=4, dim_mult=[1] * 4, num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4
    )
    pipe = WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=codec,
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        transformer=one,
        transformer_2=other,
        boundary_ratio=0.7,
    )
    pipe.set_progress_bar_config(disable=True)
    apply_token_merging(pipe, ToMeConfig(ratio=0.5, **settings))
    seen = SimpleNamespace(one=calls(one), other=calls(other))
    prompt, negative = torch.randn(2, 1, WORDS, TEXT)
    pipe(
        prompt_embeds=prompt,
        negative_prompt_embeds=negative,
        height=64,
        width=64,
        num_frames=5,
        num_inference_steps=8,
        output_type="latent",
    )
    numbers = [(index, number) for index, number, _ in seen.one + seen.other]
    assert numbers == [(index, number) for index in range(8) for number in (0, 1)]
    assert (whats(seen.one), whats(seen.other)) == (first, second)
    assert not kept(one)
    assert not kept(other)
