"""What cannot be merged is said by name, with the reason, before anything is changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from tests.models.tiny import FAMILIES as TINY
from tokenmerge import ToMeConfig, UnsupportedModelError, apply_token_merging, remove_token_merging
from tokenmerge.models.find import FAMILIES
from tokenmerge.models.unsupported import REASONS

diffusers_models = pytest.importorskip("diffusers.models")

SUPPORTED = {name for family in FAMILIES for name in family.CLASSES}
SUPPORTED |= {"DreamLiteUNetModel"}  # as the UNet2DConditionModel that it inherits from
# Networks of these folders that denoise nothing, parts of others, ControlNets that stay dense beside a
# denoiser that merges, and UNets of other blocks: the error that finds nothing to merge in them names them.
OTHER = {
    "ControlNetXSAdapter",
    "CosmosControlNetModel",
    "DreamLiteTransformer2DModel",
    "DualTransformer2DModel",
    "Kandinsky3UNet",
    "MiniMaxMusic3RVQDepthDecoder",
    "MotionAdapter",
    "PriorTransformer",
    "StableCascadeUNet",
    "Transformer2DModel",
    "TransformerTemporalModel",
    "UNet1DModel",
    "UNet2DModel",
}


def of(name: str, **attributes: Any) -> nn.Module:
    """A module of a class with this name."""
    module = type(name, (nn.Module,), {})()
    for attribute, value in attributes.items():
        setattr(module, attribute, value)
    return module


def test_every_denoiser_of_diffusers_is_supported_or_refused_with_a_reason():
    names = {
        name
        for module, names in diffusers_models._import_structure.items()
        if module.split(".")[0] in ("transformers", "controlnets", "unets")
        for name in names
        if "Multi" not in name
    }
    assert names - SUPPORTED - REASONS.keys() - OTHER == set()
    assert not SUPPORTED & (REASONS.keys() | OTHER)


@pytest.mark.parametrize("name", ["LTX2VideoTransformer3DModel", "ZImageControlNetModel"])
def test_a_pipeline_with_a_model_that_cannot_be_merged_is_refused_by_name(name):
    pipe = SimpleNamespace(transformer=of(name), unet=of("UNet2DConditionModel"))
    with pytest.raises(UnsupportedModelError, match=f"{name} yet: {REASONS[name]}"):
        apply_token_merging(pipe, ToMeConfig())


def test_qwen_image_layered_is_refused_before_its_first_call():
    """By the settings of the transformer that ``QwenImageLayeredPipeline`` is published with."""
    tiny = TINY["QwenImageTransformer2DModel"].build()
    settings = {name: value for name, value in tiny.config.items() if not name.startswith("_")}
    layered = type(tiny)(**{**settings, "use_additional_t_cond": True, "use_layer3d_rope": True})
    for model in (layered, SimpleNamespace(transformer=layered)):
        with pytest.raises(UnsupportedModelError, match=r"QwenImage-Layered yet: the sequence holds several"):
            apply_token_merging(model, ToMeConfig(ratio=0.5))
    apply_token_merging(tiny, ToMeConfig(ratio=0.5))


def test_context_parallelism_is_refused():
    with pytest.raises(UnsupportedModelError, match="FluxTransformer2DModel while context parallelism"):
        apply_token_merging(of("FluxTransformer2DModel", _parallel_config=object()), ToMeConfig())


def refused_call(name: str, **changes: Any) -> str:
    """What a call of a patched model is refused with."""
    model = TINY[name].build().eval()
    apply_token_merging(model, ToMeConfig(ratio=0.5))
    with pytest.raises(UnsupportedModelError) as caught:
        model(**{**TINY[name].inputs(2, 8, 8), **changes})
    remove_token_merging(model)
    return str(caught.value)


def test_reference_pictures_are_refused():
    two = TINY["FluxTransformer2DModel"].inputs(2, 8, 16)
    ids = two["img_ids"].clone()
    ids[64:, 0] = 1
    message = refused_call("FluxTransformer2DModel", hidden_states=two["hidden_states"], img_ids=ids)
    assert "reference pictures" in message
    assert "img_shapes: expected one picture, got 2" in refused_call(
        "QwenImageTransformer2DModel", img_shapes=[[(1, 8, 8), (1, 4, 4)]] * 2
    )


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
