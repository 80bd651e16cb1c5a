"""Attention processors may be set before a model is patched, or after: merging does the same."""

from __future__ import annotations

import warnings
from typing import Any

import hosts
import pytest
import torch
from diffusers import AutoPipelineForText2Image, StableDiffusionPipeline
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from tiny_pipeline import write_pipeline
from torch import Tensor

from tokenmerge import ToMeConfig, UnsupportedModelError, apply_token_merging

SIDE = 64  # pixels, of which the default method merges some


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_pipeline(tmp_path_factory.mktemp("pipelines") / "tiny")


def perturbed(pipe: Any) -> Any:
    return AutoPipelineForText2Image.from_pipe(pipe, enable_pag=True, pag_applied_layers=["mid", "up_blocks"])


def sliced(pipe: Any) -> Any:
    pipe.enable_attention_slicing(1)
    return pipe


def plain(pipe: Any) -> Any:
    pipe.unet.set_attn_processor(AttnProcessor())
    return pipe


CHANGES = {"PAG": perturbed, "attention slicing": sliced, "AttnProcessor": plain}
WAYS = {"ratio": {"ratio": 0.5}, "speedup": {"speedup": 2.0}}


def load(folder: Any) -> Any:
    pipe = StableDiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe: Any) -> Tensor:
    size = {"height": SIDE, "width": SIDE, "num_inference_steps": 6, "output_type": "latent"}
    return pipe("a cat", generator=torch.Generator().manual_seed(0), **size).images


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_processors_that_are_set_after_merging_give_the_picture_of_those_set_before(folder, change, way):
    before = change(load(folder))
    apply_token_merging(before, **way)
    expected = draw(before)
    pipe = load(folder)
    patch = apply_token_merging(pipe, **way)
    after = change(pipe)
    assert "not counted" not in str(patch)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pictures = [draw(after) for _ in range(2)]
    said = [str(one.message) for one in told if "count once" in str(one.message)]
    assert len(said) == 1
    assert all(torch.equal(picture, expected) for picture in pictures)


@pytest.mark.filterwarnings("ignore:.*count once:UserWarning")
def test_the_picture_without_weights_is_another_one(folder):
    """Else the test above would show nothing."""
    pipe = load(folder)
    patch = apply_token_merging(pipe, speedup=2.0)
    weighed = draw(pipe)
    assert patch.config.proportional
    pipe.unet.set_attn_processor(AttnProcessor())
    assert (draw(pipe) - weighed).abs().max() > 1e-4 * weighed.abs().max()


@pytest.mark.filterwarnings("ignore:.*count once:UserWarning")
def test_fused_attention_that_is_set_again_counts_again(folder):
    pipe = load(folder)
    apply_token_merging(pipe, ratio=0.5)
    expected = draw(pipe)
    pipe.unet.set_attn_processor(AttnProcessor())
    draw(pipe)
    pipe.unet.set_attn_processor(AttnProcessor2_0())
    assert torch.equal(draw(pipe), expected)


def test_a_model_alone_takes_other_processors_between_two_calls():
    unet = hosts.unet()
    apply_token_merging(unet, ratio=0.5)
    weighed = hosts.call(unet, **hosts.inputs())
    unet.set_attn_processor(AttnProcessor())
    with pytest.warns(UserWarning, match=r"AttnProcessor at .* runs no fused attention"):
        assert not torch.equal(hosts.call(unet, **hosts.inputs()), weighed)


def test_processors_where_nothing_merges_leave_the_weights_of_others(folder):
    """``ratio=`` merges at the finest level of a UNet; the middle of it is deeper."""
    pipe = load(folder)
    patch = apply_token_merging(pipe, ratio=0.5)
    weighed = draw(pipe)
    deeper = {name: AttnProcessor() for name in pipe.unet.attn_processors if "mid_block" in name}
    assert deeper
    pipe.unet.set_attn_processor({**pipe.unet.attn_processors, **deeper})
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert (draw(pipe) - weighed).abs().max() < 1e-4 * weighed.abs().max()  # as above, without weights
    assert patch.config.proportional


@pytest.mark.parametrize("config", [{"ratio": 0.0}, {"speedup": 1.0}])
def test_processors_of_a_model_that_merges_nothing_are_not_told(folder, config):
    pipe = load(folder)
    apply_token_merging(pipe, **config)
    pipe.unet.set_attn_processor(AttnProcessor())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        draw(pipe)


def test_settings_that_ask_for_it_are_still_refused(folder):
    pipe = load(folder)
    apply_token_merging(pipe, ToMeConfig(ratio=0.5, proportional=True))
    pipe.unet.set_attn_processor(AttnProcessor())
    with pytest.raises(UnsupportedModelError, match="proportional=True needs attention by PyTorch"):
        draw(pipe)
