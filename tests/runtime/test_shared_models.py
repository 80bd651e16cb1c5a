"""A model that several generations use: cancelled ones, in threads, within each other, and copies."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hosts
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    PNDMScheduler,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
)
from tests.runtime.test_steps_in_pipelines import draw
from tests.tuned import ERRORS, tuned, tuned_file

from tokenmerge import (
    ConfigError,
    Correction,
    MergeSharing,
    ModelInUseError,
    StepReuse,
    ToMeConfig,
    apply_patch,
    apply_token_merging,
    remove_token_merging,
    token_merging,
)
from tokenmerge.runtime.patching.patch import state_of
from tokenmerge.tuned_method import TunedMethod
from tokenmerge_tools.pipelines.loading import shared_copy

# The arithmetic of some schedulers of diffusers.
pytestmark = pytest.mark.filterwarnings("ignore:__array_(_ implementation|wrap__):DeprecationWarning")

HALF: dict[str, Any] = {"ratio": 0.5, "max_downsample": 2}
# One of each: nothing kept, plans shared in a call, corrections, step reuse, plans kept, guidance compared,
# features of the step before.
SETTINGS: dict[str, dict[str, Any]] = {
    "merging": {},
    "shared plans": {"merge_sharing": MergeSharing(blocks=True)},
    "corrected": {"correction": Correction(every=3)},
    "reused": {"reuse": StepReuse(every=2)},
    "plans kept": {"merge_sharing": MergeSharing(every=3)},
    "importance": {"planner": "importance"},
    "residuals": {"features": "residual"},
    "residuals of the model": {"features": "model_residual", "merge_sharing": MergeSharing(blocks=True)},
}
WITHOUT_STEPS = ("merging", "shared plans")
ALL = pytest.mark.parametrize("name", SETTINGS)


def with_schedulers(*schedulers: type) -> Any:
    """Each of the settings with one of the schedulers, and step reuse with all of them."""
    pairs = [
        (name, scheduler)
        for i, name in enumerate(SETTINGS)
        for j, scheduler in enumerate(schedulers)
        if name == "reused" or i % len(schedulers) == j
    ]
    return pytest.mark.parametrize(("name", "scheduler"), pairs)


def config(name: str) -> ToMeConfig:
    return ToMeConfig(**HALF, **SETTINGS[name])


def beside(pipe: StableDiffusionPipeline, scheduler: Any = None) -> StableDiffusionPipeline:
    """Another pipeline with the same models, and a scheduler and a tokenizer of its own."""
    scheduler = scheduler or type(pipe.scheduler).from_config(pipe.scheduler.config)
    own = {"scheduler": scheduler, "tokenizer": copy.deepcopy(pipe.tokenizer)}
    components = {**pipe.components, **own}
    other = StableDiffusionPipeline(**components, requires_safety_checker=False)
    other.set_progress_bar_config(disable=True)
    return other


def at_once(jobs: list[Callable[[], Any]]) -> list[Any]:
    """The results of jobs, or what they raised, each in a thread of its own, begun together."""
    results: list[Any] = [None] * len(jobs)
    barrier = threading.Barrier(len(jobs))

    def run(place: int) -> None:
        barrier.wait()
        try:
            results[place] = jobs[place]()
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@with_schedulers(DDIMScheduler, DDPMScheduler, PNDMScheduler, EulerDiscreteScheduler)
def test_a_cancelled_generation_leaves_nothing_for_the_next(pipe, name, scheduler):
    """Image to image begins where the cancelled one stopped, with equal timesteps."""
    steps, cut_after = 8, 3
    pipe.scheduler = scheduler.from_config(pipe.scheduler.config)
    apply_token_merging(pipe, config(name))
    from_picture = StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
    from_picture.set_progress_bar_config(disable=True)
    given = {"image": torch.linspace(0, 1, 3 * 32 * 32).view(1, 3, 32, 32), "strength": 0.5}
    expected = draw(from_picture, steps, **given)

    def cancel(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        pipe._interrupt = step == cut_after
        return tensors

    draw(pipe, steps, callback_on_step_end=cancel)
    assert torch.equal(draw(from_picture, steps, **given), expected)


@with_schedulers(DDIMScheduler, DDPMScheduler, PNDMScheduler, EulerDiscreteScheduler)
def test_a_second_half_takes_nothing_from_the_first_but_its_latents(pipe, name, scheduler):
    """Of SDXL, in two pipelines with one UNet. The second one begins at the step behind the first one's."""
    parts: dict[str, Any] = {
        **{"vae": pipe.vae, "unet": hosts.sdxl(), "scheduler": scheduler.from_config(pipe.scheduler.config)},
        **dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")),
    }
    base = StableDiffusionXLPipeline(**parts, add_watermarker=False)
    rest = StableDiffusionXLImg2ImgPipeline(**parts, add_watermarker=False)
    text = {key: torch.randn(1, 4, hosts.TEXT) for key in ("prompt_embeds", "negative_prompt_embeds")}
    pooled = ("pooled_prompt_embeds", "negative_pooled_prompt_embeds")
    text |= {key: torch.randn(1, hosts.TEXT) for key in pooled}

    def half(pipe: Any, **given: Any) -> torch.Tensor:
        pipe.set_progress_bar_config(disable=True)
        seeded = torch.Generator().manual_seed(0)
        given = {"num_inference_steps": 10, "output_type": "latent", "generator": seeded, **text, **given}
        return pipe(**given).images

    apply_token_merging(base, config(name))
    latents = half(base, height=32, width=32, denoising_end=0.7)
    apply_token_merging(base, config(name))  # nothing is cached
    expected = half(rest, image=latents, denoising_start=0.7)
    assert torch.equal(half(base, height=32, width=32, denoising_end=0.7), latents)
    assert torch.equal(half(rest, image=latents, denoising_start=0.7), expected)


@ALL
def test_threads_on_one_model_draw_what_each_draws_alone(pipe, name):
    """Also at several sizes, with and without guidance: each pipeline has a scheduler of its own."""
    apply_token_merging(pipe, config(name))
    kinds = [
        {"height": 32, "width": 32},
        {"height": 32, "width": 48, "guidance_scale": 1.0},
        {"height": 48, "width": 32, "guidance_scale": 9.0},
    ]
    prompts = ("a cat", "a very long dog " * 9, "an owl")
    jobs = [
        partial(draw, beside(pipe), 5, **kind, prompt=prompt)
        for kind, prompt in zip(kinds, prompts, strict=True)
    ]
    expected = [job() for job in jobs]
    for _ in range(2):
        for found, wanted in zip(at_once(jobs), expected, strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", WITHOUT_STEPS)
def test_threads_may_call_the_model_itself(name):
    """Settings that do not follow the steps need no pipeline in any thread."""
    unet = hosts.unet()
    apply_token_merging(unet, config(name))
    given = [hosts.inputs(images, seed=seed) for seed, images in enumerate((2, 2, 1, 4))]
    expected = [hosts.call(unet, **one) for one in given]

    def often(arguments: dict[str, Any], wanted: torch.Tensor) -> bool:
        return all(torch.equal(hosts.call(unet, **arguments), wanted) for _ in range(10))

    jobs = [partial(often, one, wanted) for one, wanted in zip(given, expected, strict=True)]
    assert at_once(jobs) == [True] * len(given)


def test_a_loop_in_another_thread_whose_scheduler_is_unknown_is_refused(pipe):
    """The scheduler that is known is in the middle of a generation of its own."""
    apply_token_merging(pipe, config("corrected"))
    scheduler = beside(pipe).scheduler
    scheduler.set_timesteps(5)
    found = []

    def loop() -> None:
        pipe.unet(torch.randn(1, 4, 16, 16), scheduler.timesteps[0], torch.randn(1, 4, 16))

    def in_thread(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        found.extend(at_once([loop]))
        return tensors

    expected = draw(pipe, 5)
    assert torch.equal(draw(pipe, 5, callback_on_step_end=in_thread), expected)
    assert len(found) == 5
    for error in found:
        assert isinstance(error, ConfigError)
        assert "patch.at_step(i, steps)" in str(error)


def test_steps_that_are_set_count_in_their_own_thread():
    unet, arguments = hosts.unet(), hosts.inputs(1)
    patch = apply_token_merging(unet, ToMeConfig(**HALF, reuse=StepReuse(every=2)))

    def loop(factor: float) -> torch.Tensor:
        results = []
        for index in range(5):
            patch.at_step(index, 5)
            results.append(
                hosts.call(unet, **{**arguments, "sample": factor * (1 + index) * arguments["sample"]})
            )
        return torch.stack(results)

    factors = (0.5, 1.0, 2.0)
    expected = [loop(factor) for factor in factors]
    for found, wanted in zip(at_once([partial(loop, factor) for factor in factors]), expected, strict=True):
        assert torch.equal(found, wanted)


@with_schedulers(DDIMScheduler, EulerDiscreteScheduler, DPMSolverMultistepScheduler)
def test_a_preview_within_a_generation_changes_neither(pipe, name, scheduler):
    """With guidance in the preview alone. What it has to draw is known from merging applied to it."""
    pipe.scheduler = scheduler.from_config(pipe.scheduler.config)
    inner = beside(pipe)
    apply_token_merging(inner, config(name))
    preview_expected = draw(inner, 1, guidance_scale=3.0)
    apply_token_merging(pipe, config(name))
    expected = draw(pipe, 6, guidance_scale=1.0)
    previews = []

    def preview(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        previews.append(draw(inner, 1, guidance_scale=3.0))
        return tensors

    assert torch.equal(draw(pipe, 6, guidance_scale=1.0, callback_on_step_end=preview), expected)
    assert len(previews) == 6
    assert all(torch.equal(one, preview_expected) for one in previews)


@ALL
def test_a_deep_copy_of_a_pipeline_draws_the_same_picture(pipe, name):
    apply_token_merging(pipe, config(name))
    copied = copy.deepcopy(pipe)
    given = {"guidance_scale": 7.5}
    expected = draw(pipe, 6, **given)
    assert torch.equal(draw(copied, 6, **given), expected)
    copied.scheduler = DDIMScheduler.from_config(pipe.scheduler.config)
    draw(copied, 3)  # the copy's own generation
    assert torch.equal(draw(pipe, 6, **given), expected)


def test_a_pickled_model_in_a_pipeline_shares_plans_for_guidance(pipe):
    apply_token_merging(pipe, config("merging"))
    expected = draw(pipe, 3, guidance_scale=7.5)
    pipe.unet = pickle.loads(pickle.dumps(pipe.unet))
    assert torch.equal(draw(pipe, 3, guidance_scale=7.5), expected)


@pytest.mark.parametrize(
    "asked",
    [{"speedup": 2.0}, {"speedup": 2.0, "min_psnr": 20}, {"speedup": 2.0, "start": 0.2, "until": 0.8}],
    ids=["speedup", "min_psnr", "start and until"],
)
def test_a_model_pickled_before_or_after_a_generation_draws_the_same(pipe, asked):
    apply_token_merging(pipe, **asked)
    before = pickle.dumps(pipe.unet)
    expected = draw(pipe, 12, guidance_scale=7.5)
    for written in (before, pickle.dumps(pipe.unet)):
        pipe.unet = pickle.loads(written)
        assert torch.equal(draw(pipe, 12, guidance_scale=7.5), expected)


def test_a_model_with_a_file_of_tune_can_be_pickled(pipe, tmp_path):
    apply_token_merging(pipe, tuned_file(tmp_path, tuned(1.5, 12)))
    copied = pickle.loads(pickle.dumps(pipe.unet))
    assert type(state_of(copied).default) is TunedMethod
    assert state_of(copied).default.errors == ERRORS


# --- settings of each thread's own ----------------------------------------------------------------


def sharing_weights(pipe: StableDiffusionPipeline) -> StableDiffusionPipeline:
    """A pipeline with a UNet of its own that has the same weights, and a scheduler of its own."""
    other = beside(pipe)
    other.unet = shared_copy(pipe.unet)
    return other


def test_threads_with_settings_of_their_own_draw_what_each_draws_alone(pipe):
    """On one set of weights: each thread has modules of its own. One of them is dense."""
    given = {"guidance_scale": 5.0}
    jobs = []
    for ratio, name in ((0.25, "reused"), (0.5, "corrected"), (0.75, "plans kept"), (None, "")):
        own = sharing_weights(pipe)
        if ratio is not None:
            apply_token_merging(own, dataclasses.replace(config(name), ratio=ratio))
        jobs.append(partial(draw, own, 6, **given))
        weights = zip(own.unet.parameters(), pipe.unet.parameters(), strict=True)
        assert all(mine.data_ptr() == its.data_ptr() for mine, its in weights)
    expected = [job() for job in jobs]
    assert len({tuple(picture.flatten().tolist()) for picture in expected}) == len(jobs)
    for _ in range(2):
        for found, wanted in zip(at_once(jobs), expected, strict=True):
            assert torch.equal(found, wanted)


def test_workers_of_the_serving_page_share_weights_and_no_tokenizer(pipe):
    """Threads that share a tokenizer change the padding of each other's texts between two of its calls."""
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {"pipe": pipe}
    exec(next(text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "copy" in text), names)
    workers = names["workers"]
    weights = zip(workers[0].unet.parameters(), workers[1].unet.parameters(), strict=True)
    assert all(mine.data_ptr() == its.data_ptr() for mine, its in weights)
    assert workers[0].text_encoder is workers[1].text_encoder

    def pads_as_it_is_told(tokenizer: Any) -> bool:
        for _ in range(500):
            lengths = [len(tokenizer("a cat", padding="max_length", max_length=n).input_ids) for n in (9, 16)]
            if lengths != [9, 16]:
                return False
        return True

    assert at_once([partial(pads_as_it_is_told, worker.tokenizer) for worker in workers]) == [True, True]


def test_threads_that_take_turns_may_apply_settings_to_one_model(pipe):
    lock = threading.Lock()

    def request(name: str) -> torch.Tensor:
        with lock:
            apply_token_merging(pipe, config(name))
            return draw(pipe, 5)

    jobs = [partial(request, name) for name in ("merging", "reused", "corrected", "importance")]
    expected = [job() for job in jobs]
    for found, wanted in zip(at_once(jobs), expected, strict=True):
        assert torch.equal(found, wanted)


def changes(pipe: StableDiffusionPipeline, patch: Any) -> list[Callable[[], Any]]:
    """Every way to change the settings of a pipeline's models."""

    def within() -> None:
        with token_merging(pipe, speedup=2.0):
            pass

    return [
        lambda: apply_token_merging(pipe.unet, config("merging")),
        lambda: apply_patch(beside(pipe), ratio=0.25),
        within,
        patch.remove,
        lambda: remove_token_merging(pipe),
    ]


@pytest.mark.parametrize("where", ["between steps", "in a step"])
def test_settings_do_not_change_while_another_thread_generates(pipe, where):
    """Neither in a call of the model nor between two; afterwards they do, also after an interruption."""
    patch = apply_token_merging(pipe, config("reused"))
    expected, refused = draw(pipe, 4), []

    def change(*_: Any) -> None:
        refused.extend(at_once(changes(pipe, patch)))

    def between(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        change()
        return tensors

    if where == "in a step":
        hook = pipe.unet.mid_block.register_forward_pre_hook(change)
        assert torch.equal(draw(pipe, 4), expected)
        hook.remove()
    else:
        assert torch.equal(draw(pipe, 4, callback_on_step_end=between), expected)
    assert len(refused) >= 5
    for error in refused:
        assert isinstance(error, ModelInUseError)
        assert "UNet2DConditionModel runs in another thread" in str(error)

    def interrupt(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        draw(pipe, 4, callback_on_step_end=interrupt)
    assert not any(isinstance(result, Exception) for result in at_once([changes(pipe, patch)[0]]))


def test_another_model_s_settings_may_change_meanwhile(pipe):
    """Also those of a model with the same weights; and those of the running model, by its own thread."""
    other, changed = sharing_weights(pipe), []

    def change(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        apply_token_merging(pipe, config("merging"))
        changed.extend(at_once([lambda: apply_token_merging(other, config("reused"))]))
        return tensors

    draw(pipe, 2, callback_on_step_end=change)
    assert [patch.config for patch in changed] == [config("reused")] * 2


def test_a_model_that_is_called_without_a_pipeline_is_in_use():
    unet, refused = hosts.unet(), []
    apply_token_merging(unet, config("merging"))

    def change():
        return apply_token_merging(unet, config("shared plans"))

    hook = unet.mid_block.register_forward_pre_hook(lambda *_: refused.extend(at_once([change])))
    hosts.call(unet, **hosts.inputs())
    hook.remove()
    assert [type(error) for error in refused] == [ModelInUseError]
    assert at_once([change])[0].config == config("shared plans")
