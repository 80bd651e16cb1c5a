"""What people combine with token merging: how each is put on a model, and taken off again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

Remove = Callable[[], None]

# The step of the running call, which the caches that skip by timestep ask for.
NOW = {"timestep": 0}


def lora(model: Any) -> Remove:
    """An adapter at less than its full weight; its weights are not zero."""
    from peft import LoraConfig

    torch.manual_seed(7)
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    model.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False), adapter_name="style")
    model.set_adapters(["style"], [0.7])

    def remove() -> None:
        model.unload_lora()
        model._hf_peft_config_loaded = False

    return remove


def fused_lora(model: Any) -> Remove:
    """An adapter that is added into the weights."""
    remove = lora(model)
    model.fuse_lora()

    def unfuse() -> None:
        model.unfuse_lora()
        remove()

    return unfuse


def fused_projections(model: Any) -> Remove:
    model.fuse_qkv_projections()
    return model.unfuse_qkv_projections


def sliced_attention(model: Any) -> Remove:
    model.set_attention_slice(1)
    return model.set_default_attn_processor


def other_processors(model: Any) -> Remove:
    """Processors of another kind."""
    from diffusers.models.attention_processor import AttnProcessor

    before = model.attn_processors
    model.set_attn_processor(AttnProcessor())
    return lambda: model.set_attn_processor(before)


def attention_backend(model: Any) -> Remove:
    model.set_attention_backend("native")
    return model.reset_attention_backend


def free_u(model: Any) -> Remove:
    model.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    return model.disable_freeu


def perturbed_attention(model: Any) -> Remove:
    """Two layers whose attention is the identity for half of the batch, as in PAG."""
    from diffusers.models.attention_processor import PAGIdentitySelfAttnProcessor2_0

    before = model.attn_processors
    mine = {
        name: PAGIdentitySelfAttnProcessor2_0() if "mid_block" not in name and "attn1" in name else processor
        for name, processor in before.items()
    }
    model.set_attn_processor(mine)
    return lambda: model.set_attn_processor(before)


def group_offload_by_block(model: Any) -> Remove:
    return _group_offload(model, offload_type="block_level", num_blocks_per_group=1)


def group_offload_by_leaf(model: Any) -> Remove:
    return _group_offload(model, offload_type="leaf_level")


def _group_offload(model: Any, **how: Any) -> Remove:
    model.enable_group_offload(onload_device=torch.device("cpu"), **how)
    return lambda: _remove_hooks(
        model, "group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading"
    )


def layerwise_casting(model: Any) -> Remove:
    """Weights stored as float16 and computed with as float32, which cannot be taken off again."""
    model.enable_layerwise_casting(storage_dtype=torch.float16, compute_dtype=torch.float32)
    return lambda: None


def cpu_offload(model: Any) -> Remove:
    """What sequential and whole-model offloading of pipelines put on a model: hooks of accelerate."""
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_module

    cpu_offload(model, execution_device=torch.device("cpu"))
    return lambda: remove_hook_from_module(model, recurse=True)


def pyramid_attention_broadcast(model: Any) -> Remove:
    from diffusers.hooks import PyramidAttentionBroadcastConfig, apply_pyramid_attention_broadcast

    config = PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        cross_attention_block_skip_range=3,
        spatial_attention_timestep_skip_range=(-1, 2000),
        cross_attention_timestep_skip_range=(-1, 2000),
        current_timestep_callback=lambda: NOW["timestep"],
    )
    return _cache(model, config, apply_pyramid_attention_broadcast, "pyramid_attention_broadcast")


def faster_cache(model: Any) -> Remove:
    from diffusers.hooks import FasterCacheConfig, apply_faster_cache

    config = FasterCacheConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 650),  # it needs two steps to begin with
        attention_weight_callback=lambda _: 0.5,
        is_guidance_distilled=True,
        current_timestep_callback=lambda: NOW["timestep"],
    )
    return _cache(model, config, apply_faster_cache, "faster_cache_denoiser", "faster_cache_block")


def first_block_cache(model: Any) -> Remove:
    from diffusers.hooks import FirstBlockCacheConfig

    return _cache(model, FirstBlockCacheConfig(threshold=0.4))


def taylor_seer(model: Any) -> Remove:
    from diffusers.hooks import TaylorSeerCacheConfig

    return _cache(
        model,
        TaylorSeerCacheConfig(
            cache_interval=2, disable_cache_before_step=1, taylor_factors_dtype=torch.float32
        ),
    )


def mag_cache(model: Any) -> Remove:
    from diffusers.hooks import MagCacheConfig

    return _cache(
        model,
        MagCacheConfig(threshold=10.0, retention_ratio=0.1, num_inference_steps=8, mag_ratios=[0.9] * 8),
    )


def _cache(model: Any, config: Any, apply: Callable | None = None, *hooks: str) -> Remove:
    if hasattr(model, "enable_cache"):
        model.enable_cache(config)
        return model.disable_cache
    assert apply is not None
    apply(model, config)
    return lambda: _remove_hooks(model, *hooks)


def skipped_layer(model: Any) -> Remove:
    """What skip-layer guidance does around every step."""
    from diffusers.hooks import LayerSkipConfig, apply_layer_skip

    apply_layer_skip(model, LayerSkipConfig(indices=[1], fqn="blocks"))
    return lambda: _remove_hooks(model, "layer_skip_hook")


def skipped_attention_scores(model: Any) -> Remove:
    """What the guider of perturbed attention does around every step."""
    from diffusers.hooks import LayerSkipConfig, apply_layer_skip

    config = LayerSkipConfig(
        indices=[0],
        fqn="down_blocks.0.attentions.0.transformer_blocks",
        skip_attention=False,
        skip_ff=False,
        skip_attention_scores=True,
    )
    apply_layer_skip(model, config)
    return lambda: _remove_hooks(model, "layer_skip_hook")


def quantised(model: Any) -> Remove:
    """Linear layers with 8-bit weights, which cannot be taken off again."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())
    return lambda: None


def _remove_hooks(model: nn.Module, *names: str) -> None:
    for module in model.modules():
        registry = module.__dict__.get("_diffusers_hook")
        for name in names:
            if registry is not None and name in registry.hooks:
                registry.remove_hook(name, recurse=False)


def new_generation(model: nn.Module) -> None:
    """Tell caches that a denoising loop begins, as pipelines do at the end of one."""
    if registry := model.__dict__.get("_diffusers_hook"):
        registry.reset_stateful_hooks(recurse=True)
    else:
        for child in model.children():
            new_generation(child)


@contextlib.contextmanager
def step_of(model: Any, timestep: int) -> Iterator[None]:
    """One call of a denoising loop, as pipelines announce it to the caches."""
    NOW["timestep"] = timestep
    with model.cache_context("cond") if hasattr(model, "cache_context") else contextlib.nullcontext():
        yield
