"""Merging on whole pipelines: shared parts, pipelines made from others, adapters, saving, threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionImg2ImgPipeline, StableDiffusionPAGPipeline, StableDiffusionPipeline
from tiny_pipeline import write_pipeline

from tokenmerge import ToMeConfig, apply_token_merging, remove_token_merging

HALF = ToMeConfig(ratio=0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_pipeline(tmp_path_factory.mktemp("pipelines") / "tiny")


@pytest.fixture
def pipe(folder):
    return load(folder)


def load(folder):
    pipe = StableDiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe, seed=0, **arguments):
    generator = torch.Generator().manual_seed(seed)
    call = {"num_inference_steps": 3, "generator": generator, "output_type": "np", **arguments}
    return pipe("a cat", **call).images


def test_two_pipelines_that_share_a_unet(pipe):
    other = StableDiffusionImg2ImgPipeline.from_pipe(pipe)
    other.set_progress_bar_config(disable=True)
    picture = draw(pipe)
    dense = draw(pipe), draw(other, image=picture)
    apply_token_merging(pipe, HALF)
    assert not np.array_equal(draw(pipe), dense[0])
    assert not np.array_equal(draw(other, image=picture), dense[1])
    remove_token_merging(other)
    assert np.array_equal(draw(pipe), dense[0])
    assert np.array_equal(draw(other, image=picture), dense[1])


def test_a_pipeline_made_from_a_merged_one_merges(pipe):
    apply_token_merging(pipe, HALF)
    merged = draw(pipe)
    again = StableDiffusionPipeline.from_pipe(pipe)
    again.set_progress_bar_config(disable=True)
    assert again.unet is pipe.unet
    assert np.array_equal(draw(again), merged)


@pytest.mark.parametrize("merging_first", [True, False])
def test_perturbed_attention_guidance(pipe, merging_first):
    if merging_first:
        apply_token_merging(pipe, HALF)
    guided = StableDiffusionPAGPipeline.from_pipe(pipe, pag_applied_layers=["mid"])
    guided.set_progress_bar_config(disable=True)
    if not merging_first:
        apply_token_merging(guided, HALF)
    merged = draw(guided, pag_scale=3.0)
    assert np.isfinite(merged).all()
    assert not np.array_equal(merged, draw(guided, pag_scale=0.0))
    remove_token_merging(guided)
    assert not np.array_equal(merged, draw(guided, pag_scale=3.0))


def test_saving_a_merged_pipeline_saves_the_plain_one(pipe, tmp_path):
    dense = draw(pipe)
    apply_token_merging(pipe, HALF)
    merged = draw(pipe)
    pipe.save_pretrained(tmp_path / "saved")
    assert np.array_equal(draw(pipe), merged)
    loaded = load(tmp_path / "saved")
    assert np.array_equal(draw(loaded), dense)
    apply_token_merging(loaded, HALF)
    assert np.array_equal(draw(loaded), merged)


def test_two_threads_on_two_pipelines(folder):
    pipes = [load(folder), load(folder)]
    configs = [HALF, ToMeConfig(ratio=0.25, max_downsample=2)]
    for pipe, config in zip(pipes, configs, strict=True):
        apply_token_merging(pipe, config)
    expected = [draw(pipe, seed=i, num_inference_steps=5) for i, pipe in enumerate(pipes)]
    results: list = [None, None]

    def work(i: int) -> None:
        results[i] = draw(pipes[i], seed=i, num_inference_steps=5)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result, wanted in zip(results, expected, strict=True):
        assert np.array_equal(result, wanted)


def ip_adapter(unet) -> dict:
    """The weights of an IP-Adapter with one image token group, in the format of its files."""
    torch.manual_seed(3)
    width = unet.config.cross_attention_dim
    weights = {
        "proj.weight": torch.randn(4 * width, 8),
        "proj.bias": torch.randn(4 * width),
        "norm.weight": torch.ones(width),
        "norm.bias": torch.zeros(width),
    }
    layers = {}
    key = 1
    for name in unet.attn_processors:
        if name.endswith("attn2.processor"):
            hidden = unet.get_submodule(name.removesuffix(".processor")).to_q.in_features
            layers[f"{key}.to_k_ip.weight"] = torch.randn(hidden, width)
            layers[f"{key}.to_v_ip.weight"] = torch.randn(hidden, width)
            key += 2
    return {"image_proj": weights, "ip_adapter": layers}


@pytest.mark.parametrize("merging_first", [True, False])
@pytest.mark.parametrize("merging_goes_first", [True, False])
def test_ip_adapter(folder, merging_first, merging_goes_first):
    picture = [torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(5))]

    def load_adapter(pipe):
        pipe.unet._load_ip_adapter_weights([ip_adapter(pipe.unet)])
        pipe.set_ip_adapter_scale(0.7)

    plain = load(folder)
    dense = draw(plain)
    load_adapter(plain)
    adapted = draw(plain, ip_adapter_image_embeds=picture)
    assert not np.array_equal(adapted, dense)

    pipe = load(folder)
    if merging_first:
        apply_token_merging(pipe, HALF)
        load_adapter(pipe)
    else:
        load_adapter(pipe)
        apply_token_merging(pipe, HALF)
    both = draw(pipe, ip_adapter_image_embeds=picture)
    reference = load(folder)
    load_adapter(reference)
    apply_token_merging(reference, HALF)
    assert np.array_equal(both, draw(reference, ip_adapter_image_embeds=picture))
    assert not np.array_equal(both, adapted)
    if merging_goes_first:
        remove_token_merging(pipe)
        assert np.array_equal(draw(pipe, ip_adapter_image_embeds=picture), adapted)
        pipe.unload_ip_adapter()
    else:
        pipe.unload_ip_adapter()
        assert not np.array_equal(draw(pipe), dense)
        remove_token_merging(pipe)
    assert np.array_equal(draw(pipe), dense)


@pytest.mark.parametrize("merging_first", [True, False])
def test_deep_cache(pipe, merging_first):
    deep_cache = pytest.importorskip("DeepCache")
    dense = draw(pipe)
    if merging_first:
        apply_token_merging(pipe, HALF)
    helper = deep_cache.DeepCacheSDHelper(pipe=pipe)
    helper.set_params(cache_interval=2, cache_branch_id=0)
    helper.enable()
    if not merging_first:
        apply_token_merging(pipe, HALF)
    merged = draw(pipe, num_inference_steps=4)
    assert np.isfinite(merged).all()
    helper.disable()
    remove_token_merging(pipe)
    assert np.array_equal(draw(pipe), dense)
