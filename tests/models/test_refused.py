"""A model that cannot be merged is refused by name, with the reason, before anything is changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import vits
from tests.models.tiny import FAMILIES as TINY
from torch import nn

from tokenmerge import ToMeConfig, UnsupportedModelError, apply_token_merging, remove_token_merging
from tokenmerge.models.unsupported import REASONS


def of(name: str, **attributes: Any) -> nn.Module:
    """A module of a class with this name."""
    module = type(name, (nn.Module,), {})()
    for attribute, value in attributes.items():
        setattr(module, attribute, value)
    return module


@pytest.mark.parametrize("name", ["OmniGenTransformer2DModel", "ZImageControlNetModel"])
def test_a_pipeline_with_a_model_that_cannot_be_merged_is_refused_by_name(name):
    pipe = SimpleNamespace(transformer=of(name), unet=of("UNet2DConditionModel"))
    with pytest.raises(
        UnsupportedModelError,
        match=f"{name} yet: {REASONS[name]}; run it without token merging, or take a model",
    ):
        apply_token_merging(pipe, ToMeConfig())


def test_a_pipeline_that_gives_its_model_other_samples_is_refused_at_once():
    """The same model merges in another pipeline."""
    transformer = TINY["ZImageTransformer2DModel"].build()
    pipe = type("ZImageOmniPipeline", (), {})()
    pipe.transformer = transformer
    with pytest.raises(UnsupportedModelError, match="ZImageOmniPipeline yet: each of its samples"):
        apply_token_merging(pipe, ToMeConfig())
    apply_token_merging(SimpleNamespace(transformer=transformer), ToMeConfig()).remove()


def test_a_pipeline_that_caches_keys_of_reference_pictures_is_refused_at_once():
    """Flux2KleinPipeline merges in the same model."""
    pipe = type("Flux2KleinKVPipeline", (), {})()
    pipe.transformer = TINY["Flux2Transformer2DModel"].build()
    with pytest.raises(
        UnsupportedModelError, match=r"KVPipeline yet: it caches .*; Flux2KleinPipeline draws"
    ):
        apply_token_merging(pipe, ToMeConfig())


def test_the_reason_stands_also_beside_a_vision_transformer():
    """The image encoder of the pipeline is not what its user wants to merge in."""
    pipe = SimpleNamespace(
        transformer=of("HunyuanVideoFramepackTransformer3DModel"), image_encoder=vits.clip()
    )
    for settings in (ToMeConfig(), None):
        with pytest.raises(
            UnsupportedModelError, match=r"Framepack.* yet: the sequence holds earlier frames"
        ):
            apply_token_merging(pipe, settings)


def refused_call(name: str, **changes: Any) -> str:
    """The message with which a call of a patched model is refused."""
    model = TINY[name].build().eval()
    apply_token_merging(model, ToMeConfig(ratio=0.5))
    with pytest.raises(UnsupportedModelError) as caught:
        model(**{**TINY[name].inputs(2, 8, 8), **changes})
    remove_token_merging(model)
    return str(caught.value)


def test_positions_that_are_not_those_of_pictures_are_refused():
    ids = TINY["FluxTransformer2DModel"].inputs(2, 8, 8)["img_ids"]
    holes = ids.clone()
    holes[-1, 1] = 99
    for wrong in (holes, ids + 0.5, ids[:-1]):
        message = refused_call("FluxTransformer2DModel", img_ids=wrong)
        assert "or several images one after another" in message


def test_layers_of_different_size_are_refused():
    shapes = [[(1, 8, 8), (1, 7, 8), (1, 8, 8)]] * 2
    name = "QwenImageTransformer2DModel, Layered"
    assert "img_shapes: expected layers of one size" in refused_call(name, img_shapes=shapes)


def test_samples_with_pictures_of_different_size_are_refused():
    shapes = [[(1, 8, 8), (1, 9, 8), (1, 16, 8)], [(1, 8, 8), (1, 8, 8), (1, 8, 8)]]
    name = "JoyImageEditPlusTransformer3DModel"
    assert "shape_list: expected images of the same sizes" in refused_call(name, shape_list=shapes)


def test_images_of_different_size_in_a_list_are_refused():
    a, b = (TINY["ZImageTransformer2DModel"].inputs(1, *size)["x"][0] for size in ((8, 8), (4, 8)))
    assert "(1, 8, 16), (1, 16, 16)" in refused_call("ZImageTransformer2DModel", x=[a, b])


def test_modes_that_keep_keys_and_values_are_refused():
    assert "kv_cache_mode='extract'" in refused_call("Flux2Transformer2DModel", kv_cache_mode="extract")


def test_sparse_attention_is_refused():
    message = refused_call("Kandinsky5Transformer3DModel", sparse_params={"to_fractal": True})
    assert "sparse_params" in message


def test_packed_samples_are_refused():
    message = refused_call("CogView4Transformer2DModel", attention_kwargs={"batch_flag": None})
    assert "batch_flag" in message


def test_a_video_without_the_size_of_its_latents_is_refused():
    assert "num_frames, height, width" in refused_call("LTXVideoTransformer3DModel", height=None)
