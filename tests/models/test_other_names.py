"""Pipelines whose denoiser is called neither unet nor transformer: it is found by its class."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DDPMWuerstchenScheduler,
    HeunDiscreteScheduler,
    UnCLIPScheduler,
)
from diffusers.pipelines.deprecated.wuerstchen import WuerstchenDecoderPipeline, WuerstchenPriorPipeline
from hosts import unet
from tests.models.undescribed import TEXT, build, noise
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from tokenmerge import UnsupportedModelError, apply_token_merging
from tokenmerge.models.find import find_hosts

STEPS = 10
ENCODER = SimpleNamespace(dtype=torch.float32)  # whose result is given
TEXTS = {
    "prompt_embeds": noise(1, TEXT, 16),
    "prompt_embeds_pooled": noise(1, 1, 16),
    "negative_prompt_embeds": noise(1, TEXT, 16) * 0.5,
    "negative_prompt_embeds_pooled": noise(1, 1, 16) * 0.5,
}
pytestmark = [
    # Small models and those that add noise cannot be close to dense.
    pytest.mark.filterwarnings("ignore:speedup=2"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept"),
]


@dataclasses.dataclass
class Case:
    """A pipeline with tiny random parts, its denoisers, and a generation."""

    pipe: Any
    denoisers: dict[str, nn.Module]  # by the name of the attribute
    draw: Callable[..., Any]
    calls: int = STEPS  # of each denoiser in a generation

    def generate(self) -> Tensor:
        self.pipe.set_progress_bar_config(disable=True)
        (made, *_) = self.draw(
            num_inference_steps=STEPS, generator=torch.Generator().manual_seed(1), return_dict=False
        )
        return made


def _cascade_prior() -> nn.Module:
    return build("StableCascadeUNet", clip_text_in_channels=16, clip_image_in_channels=16)


def _cascade_decoder() -> nn.Module:
    return build("StableCascadeUNet", effnet_in_channels=4)


def stable_cascade_prior() -> Case:
    prior = _cascade_prior()
    pipe = diffusers.StableCascadePriorPipeline(
        tokenizer=None, text_encoder=None, prior=prior, scheduler=DDPMWuerstchenScheduler()
    )
    pipe.text_encoder = ENCODER

    def draw(**given: Any) -> Any:
        return pipe(**TEXTS, height=256, width=256, output_type="pt", **given)

    return Case(pipe, {"prior": prior}, draw)


def stable_cascade_decoder() -> Case:
    decoder = _cascade_decoder()
    pipe = diffusers.StableCascadeDecoderPipeline(
        decoder=decoder,
        tokenizer=None,
        text_encoder=None,
        scheduler=DDPMWuerstchenScheduler(),
        vqgan=None,
        latent_dim_scale=2.0,
    )

    def draw(**given: Any) -> Any:
        texts = {name: value for name, value in TEXTS.items() if not name.startswith("negative")}
        return pipe(noise(1, 4, 4, 4), **texts, guidance_scale=0.0, output_type="latent", **given)

    return Case(pipe, {"decoder": decoder}, draw)


def wuerstchen_prior() -> Case:
    prior = build("WuerstchenPrior")
    pipe = WuerstchenPriorPipeline(
        tokenizer=None, text_encoder=None, prior=prior, scheduler=DDPMWuerstchenScheduler()
    )
    pipe.text_encoder = ENCODER

    def draw(**given: Any) -> Any:
        texts = {name: value for name, value in TEXTS.items() if not name.endswith("pooled")}
        return pipe(**texts, height=256, width=256, output_type="pt", **given)

    return Case(pipe, {"prior": prior}, draw)


def wuerstchen_decoder() -> Case:
    decoder = build("WuerstchenDiffNeXt")
    pipe = WuerstchenDecoderPipeline(
        tokenizer=None,
        text_encoder=None,
        decoder=decoder,
        scheduler=DDPMWuerstchenScheduler(),
        vqgan=None,
        latent_dim_scale=2.0,
    )
    pipe.encode_prompt = lambda *_: (noise(1, TEXT, 16), None)

    def draw(**given: Any) -> Any:
        return pipe(noise(1, 4, 4, 4), "", guidance_scale=0.0, output_type="latent", **given)

    return Case(pipe, {"decoder": decoder}, draw)


def kandinsky_prior() -> Case:
    prior = build("PriorTransformer")
    pipe = diffusers.KandinskyV22PriorPipeline(
        prior=prior,
        image_encoder=None,
        text_encoder=None,
        tokenizer=None,
        scheduler=UnCLIPScheduler(prediction_type="sample", clip_sample_range=5.0),
        image_processor=None,
    )
    words = noise(2, 16), noise(2, TEXT, 16), torch.ones(2, TEXT, dtype=torch.bool)
    pipe._encode_prompt = lambda *_: words
    pipe.get_zero_embed = lambda *_, **__: torch.zeros(1, 16)

    def draw(**given: Any) -> Any:
        return pipe("", **given)

    return Case(pipe, {"prior": prior}, draw)


def shap_e() -> Case:
    prior = build(
        "PriorTransformer",
        additional_embeddings=0,
        time_embed_act_fn="gelu",
        norm_in_type="layer",
        encoder_hid_proj_type=None,
        added_emb_type=None,
        clip_embed_dim=32,
    )
    pipe = diffusers.ShapEPipeline(
        prior=prior,
        text_encoder=None,
        tokenizer=None,
        scheduler=HeunDiscreteScheduler(
            beta_schedule="exp", prediction_type="sample", use_karras_sigmas=True, clip_sample=True
        ),
        shap_e_renderer=None,
    )
    pipe._encode_prompt = lambda *_: noise(2, 16)

    def draw(**given: Any) -> Any:
        given.pop("return_dict")
        return (pipe("", output_type="latent", **given).images,)

    # Heun's method calls the model twice in each step but the last.
    return Case(pipe, {"prior": prior}, draw, calls=2 * STEPS - 1)


def stable_cascade() -> Case:
    """The prior and then the decoder, of which each has a scheduler of its own."""
    prior, decoder = _cascade_prior(), _cascade_decoder()
    pipe = diffusers.StableCascadeCombinedPipeline(
        tokenizer=None,
        text_encoder=None,
        decoder=decoder,
        scheduler=DDPMWuerstchenScheduler(),
        vqgan=None,
        prior_prior=prior,
        prior_text_encoder=None,
        prior_tokenizer=None,
        prior_scheduler=DDPMWuerstchenScheduler(),
    )
    pipe.prior_pipe.text_encoder = ENCODER
    pipe.decoder_pipe.text_encoder = ENCODER

    def draw(num_inference_steps: int, **given: Any) -> Any:
        return pipe(
            **TEXTS,
            height=256,
            width=256,
            prior_num_inference_steps=num_inference_steps,
            num_inference_steps=num_inference_steps,
            decoder_guidance_scale=0.0,
            output_type="latent",
            **given,
        )

    return Case(pipe, {"decoder": decoder, "prior_prior": prior}, draw)


CASES = [
    kandinsky_prior,
    shap_e,
    stable_cascade,
    stable_cascade_decoder,
    stable_cascade_prior,
    wuerstchen_decoder,
    wuerstchen_prior,
]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def runs(case: Case) -> tuple[Tensor, list[int]]:
    """The result of a generation, and in how many calls each denoiser ran its inside."""
    skipped = [getattr(model, "transformer_blocks", model) for model in case.denoisers.values()]
    inner = [list(module.modules())[-1] for module in skipped]
    ran = [0] * len(inner)

    def note(module: nn.Module, _: object) -> None:
        if module in inner:
            ran[inner.index(module)] += 1

    hook = register_module_forward_pre_hook(note)
    try:
        return case.generate(), ran
    finally:
        hook.remove()


@pytest.mark.parametrize("make", CASES)
def test_half_of_the_steps_of_a_real_pipeline_are_skipped(make):
    case = make()
    dense, ran = runs(case)
    assert ran == [case.calls] * len(case.denoisers)
    patch = apply_token_merging(case.pipe, speedup=2.0)
    made, ran = runs(case)
    report = patch.report()
    assert report.steps == case.calls
    assert ran == [report.step_signs.count("D")] * len(case.denoisers)
    assert ran[0] <= case.calls / 2
    assert report.speedup > 1.5
    assert f"last run: {case.calls} steps, " in str(patch)
    assert torch.isfinite(made).all()
    assert not torch.equal(made, dense)
    assert torch.equal(case.generate(), made)
    patch.remove()
    assert torch.equal(case.generate(), dense)


@pytest.mark.parametrize("make", CASES)
def test_the_denoisers_are_found_and_nothing_else(make):
    case = make()
    case.pipe.vae = AutoencoderKL()  # whose decoder takes no timestep
    assert [host.root for host in find_hosts(case.pipe)] == list(case.denoisers.values())


def test_a_prior_stays_dense_beside_a_model_that_merges():
    """As in the combined pipelines of Kandinsky; it has a pipeline of its own, which can be sped up too."""
    denoiser, prior = unet(), build("PriorTransformer")
    pipe = SimpleNamespace(prior_prior=prior, unet=denoiser, scheduler=DDIMScheduler())
    for settings in ({"ratio": 0.5}, {"speedup": 2.0}):
        patch = apply_token_merging(pipe, **settings)
        assert str(patch).startswith("tokenmerge in UNet2DConditionModel: ")
        assert [host.root for host in find_hosts(pipe)] == [denoiser]
        patch.remove()
    apply_token_merging(SimpleNamespace(prior=prior, scheduler=DDIMScheduler()), speedup=2.0).remove()


def test_a_decoder_that_is_no_denoiser_is_refused_by_its_name():
    pipe = SimpleNamespace(decoder=AutoencoderKL(), scheduler=DDIMScheduler())
    with pytest.raises(
        UnsupportedModelError, match="found AutoencoderKL in SimpleNamespace, and none of them is a denoiser"
    ):
        apply_token_merging(pipe, speedup=2.0)
