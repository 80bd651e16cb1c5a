"""Pipelines of ppdiffusers, with tiny models."""

import numpy as np
import paddle
import paddle_hosts as hosts
import pytest
from PIL import Image
from ppdiffusers import (
    AutoencoderKL,
    DDIMScheduler,
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
)
from ppdiffusers.pipelines.controlnet import MultiControlNetModel

from tokenmerge import NothingToMergeError, ToMeConfig
from tokenmerge.paddle import apply_patch, apply_token_merging, remove_patch

PICTURE = Image.fromarray((np.random.default_rng(0).random((32, 32, 3)) * 255).astype("uint8"))
MASK = Image.fromarray((np.arange(32 * 32).reshape(32, 32) % 2 * 255).astype("uint8"))


def parts(unet, **more):
    paddle.seed(0)
    vae = AutoencoderKL(
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    vae.eval()
    scheduler = DDIMScheduler(beta_schedule="scaled_linear", clip_sample=False, steps_offset=1)
    return {
        **{"vae": vae, "unet": unet, "scheduler": scheduler, "text_encoder": None, "tokenizer": None},
        **more,
    }


def stable(cls, unet=None, **more):
    settings = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    pipe = cls(**parts(unet or hosts.unet(), **settings, **more))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def text():
    return {
        "prompt_embeds": hosts.tensor(1, 7, hosts.TEXT),
        "negative_prompt_embeds": hosts.tensor(1, 7, hosts.TEXT, seed=1),
    }


def controlled(count, wrapper=list):
    nets = [hosts.controlnet(seed) for seed in range(1, count + 1)]
    return stable(StableDiffusionControlNetPipeline, controlnet=nets[0] if count == 1 else wrapper(nets))


def sdxl():
    more = {"text_encoder_2": None, "tokenizer_2": None, "force_zeros_for_empty_prompt": True}
    pipe = StableDiffusionXLPipeline(**parts(hosts.sdxl(), **more))
    pipe.set_progress_bar_config(disable=True)
    return pipe


POOLED = {
    "pooled_prompt_embeds": hosts.tensor(1, hosts.TEXT, seed=2),
    "negative_pooled_prompt_embeds": hosts.tensor(1, hosts.TEXT, seed=3),
}
SIZE = {"height": 32, "width": 32}
PIPELINES = {
    "text to image": lambda: (stable(StableDiffusionPipeline), SIZE, {}),
    "odd size": lambda: (stable(StableDiffusionPipeline), {"height": 40, "width": 24}, {}),
    "image to image": lambda: (stable(StableDiffusionImg2ImgPipeline), {"image": PICTURE}, {}),
    "inpainting": lambda: (
        stable(StableDiffusionInpaintPipeline, hosts.unet(in_channels=9)),
        {"image": PICTURE, "mask_image": MASK, **SIZE},
        {},
    ),
    "controlnet": lambda: (controlled(1), {"image": PICTURE}, {}),
    "two controlnets": lambda: (controlled(2), {"image": [PICTURE, PICTURE]}, {}),
    "a pair of controlnets": lambda: (
        controlled(2, lambda nets: MultiControlNetModel(nets)),
        {"image": [PICTURE, PICTURE]},
        {},
    ),
    "sdxl": lambda: (sdxl(), {**SIZE, **POOLED}, {"max_downsample": 2}),
}


def draw(pipe, arguments):
    generator = paddle.Generator().manual_seed(0)
    return pipe(**text(), **arguments, num_inference_steps=2, generator=generator, output_type="np").images


def patched(pipe):
    return [
        type(layer).__name__
        for component in pipe.components.values()
        if isinstance(component, paddle.nn.Layer)
        for layer in component.sublayers(include_self=True)
        if "_tokenmerge" in layer.__dict__ and hasattr(layer, "config")
    ]


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_merge_and_are_restored(name):
    pipe, arguments, settings = PIPELINES[name]()
    dense = draw(pipe, arguments)
    assert apply_patch(pipe, ratio=0.5, **settings) is pipe
    merged = draw(pipe, arguments)
    assert np.array_equal(draw(pipe, arguments), merged)
    assert not np.array_equal(merged, dense)
    nets = patched(pipe).count("ControlNetModel")
    assert nets == {"controlnet": 1, "two controlnets": 2, "a pair of controlnets": 2}.get(name, 0)
    remove_patch(pipe)
    assert np.array_equal(draw(pipe, arguments), dense)
    assert patched(pipe) == []


def test_controlnets_in_a_list_of_a_pipelines_components_are_patched(monkeypatch):
    pipe = stable(StableDiffusionPipeline)
    nets = [hosts.controlnet(1), hosts.controlnet(2)]
    everything = {**pipe.components, "controlnet": nets}
    monkeypatch.setattr(StableDiffusionPipeline, "components", property(lambda self: everything))
    apply_patch(pipe)
    assert all("_tokenmerge" in net.__dict__ for net in nets)
    remove_patch(pipe)
    assert not any("_tokenmerge" in net.__dict__ for net in nets)


def test_only_a_controlnet_may_stay_dense():
    chunked = hosts.controlnet()
    for block in hosts.blocks(chunked):
        block.set_chunk_feed_forward(2)  # such layers do not merge
    pipe = stable(StableDiffusionControlNetPipeline, controlnet=chunked)
    mlps = ToMeConfig(ratio=0.5, merge_attn=False, merge_mlp=True)
    patch = apply_token_merging(pipe, mlps)
    assert any(note.startswith("ControlNetModel: ") for note in patch.report().notes)
    with pytest.raises(NothingToMergeError, match="of ControlNetModel"):
        apply_token_merging(chunked, mlps)


def test_the_finest_level_that_can_merge_always_does():
    """As in SDXL, which has no attention at level 1."""
    deep = hosts.controlnet(down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"))
    pipe = stable(StableDiffusionControlNetPipeline, controlnet=deep)
    patch = apply_token_merging(pipe, ToMeConfig(ratio=0.5))
    assert {row.level for row in patch.report().rows if row.model == "ControlNetModel"} == {2}


def test_the_report_takes_the_size_of_the_picture():
    pipe = stable(StableDiffusionPipeline)
    patch = apply_token_merging(pipe, ToMeConfig(ratio=0.5))
    scale = pipe.vae_scale_factor
    assert scale > 1
    report = patch.report(height=16 * scale, width=24 * scale)
    assert {row.grid for row in report.rows} == {(16, 24)}
