"""A cache of another package on a model is seen in either order, and the error says how to take it off."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import diffusers
import hosts
import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.hooks import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    SeaCacheConfig,
    TaylorSeerCacheConfig,
    apply_faster_cache,
    apply_first_block_cache,
    apply_pyramid_attention_broadcast,
)
from tests.models.tiny import FAMILIES
from torch import nn

from tokenmerge import (
    Correction,
    StepReuse,
    ToMeConfig,
    UnsupportedModelError,
    apply_token_merging,
    remove_token_merging,
)

STEPS = 6
FLUX = FAMILIES["FluxTransformer2DModel"]


class Pipe:
    """A pipeline that runs its model at each step, in the context that caches of diffusers need."""

    def __init__(self) -> None:
        self.transformer = FLUX.build().eval()
        self.scheduler = FlowMatchEulerDiscreteScheduler()
        self.timestep = 0.0

    @torch.no_grad()
    def __call__(self) -> torch.Tensor:
        arguments = FLUX.inputs(1, 8, 8)
        self.scheduler.set_timesteps(STEPS)
        for index, timestep in enumerate(self.scheduler.timesteps):
            self.timestep = float(timestep)
            now = {**arguments, "timestep": timestep.expand(1)}
            facts = {
                "step_index": index,
                "sigma": float(self.scheduler.sigmas[index]),
                "num_inference_steps": STEPS,
            }
            with self.transformer.cache_context("cond", **facts):
                latest = self.transformer(**now, return_dict=False)[0]
            self.scheduler._step_index = index + 1
        self.transformer._reset_stateful_cache()
        return latest


def pyramid(pipe: Pipe) -> Any:
    return PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 1001),
        current_timestep_callback=lambda: pipe.timestep,
    )


def taylor_seer(pipe: Pipe, *, inside: str | None = None) -> Any:
    return TaylorSeerCacheConfig(
        cache_interval=2,
        disable_cache_before_step=1,
        taylor_factors_dtype=torch.float32,
        cache_identifiers=None if inside is None else [inside],
    )


def faster(pipe: Pipe) -> Any:
    return FasterCacheConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 700),  # it needs two steps to begin with
        attention_weight_callback=lambda _: 0.5,
        is_guidance_distilled=True,
        current_timestep_callback=lambda: pipe.timestep,
    )


def first_block(pipe: Pipe) -> Any:
    return FirstBlockCacheConfig(threshold=10.0)


def mag(pipe: Pipe) -> Any:
    return MagCacheConfig(
        threshold=10.0, retention_ratio=0.1, num_inference_steps=STEPS, mag_ratios=[0.9] * STEPS
    )


def sea(pipe: Pipe) -> Any:
    def latents(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        return [kwargs["hidden_states"][0].unflatten(0, (8, 8)).movedim(-1, 0)[:, None]]

    return SeaCacheConfig(threshold=10.0, raw_vision_callback=latents)


INSIDE_BLOCKS = [pyramid, taylor_seer, faster]
AROUND_BLOCKS = [first_block, mag, sea]
CHANGES = ToMeConfig(ratio=0.5, scope="block", rules=[{"start": 0.5, "ratio": 0.25}])
KEEPS = ToMeConfig(ratio=0.5, scope="block", rules=[{"start": 0.5, "seed": 7, "features": "residual"}])

either_order = pytest.mark.parametrize("cache_first", [True, False])


def apply_both(pipe: Pipe, asked: dict[str, Any], cache: Any, cache_first: bool) -> None:
    """Apply token merging and enable a cache, and run the pipeline."""
    if cache_first:
        pipe.transformer.enable_cache(cache)
    apply_token_merging(pipe, **asked)
    if not cache_first:
        pipe.transformer.enable_cache(cache)
    pipe()


def refusal(pipe: Pipe, asked: dict[str, Any], cache: Any, cache_first: bool) -> str:
    """Return the error of applying token merging beside a cache, or of the run after a cache was enabled."""
    if cache_first:
        pipe.transformer.enable_cache(cache)
        with pytest.raises(UnsupportedModelError) as refused:
            apply_token_merging(pipe, **asked)
    else:
        apply_token_merging(pipe, **asked)
        pipe.transformer.enable_cache(cache)
        with pytest.raises(UnsupportedModelError) as refused:
            pipe()
    return str(refused.value)


@either_order
@pytest.mark.parametrize("cache", INSIDE_BLOCKS)
@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({"ratio": 0.5}, "ratio=0.5 merges .*such as ToMeConfig"),
        (
            {"config": CHANGES},
            r"rules\[0\]={'start': 0.5, 'ratio': 0.25} merges .*or leave rules\[0\]=.* out$",
        ),
        (
            {"config": ToMeConfig(ratio=0.5, scope="block", correction=Correction(every=3))},
            r"correction.every=3 merges .*or leave correction.every=3 out$",
        ),
        ({"config": "sdtm"}, r"'sdtm' with rules\[1\]=.* merges .*such as ToMeConfig"),
    ],
)
def test_caches_inside_blocks_are_refused_where_the_number_of_tokens_changes(
    cache_first, cache, asked, names
):
    pipe = Pipe()
    error = refusal(pipe, asked, cache(pipe), cache_first)
    assert re.search(names, error)
    assert re.match(r"transformer_blocks.0.attn: .* keeps .*: model.disable_cache\(\), or", error)
    pipe.transformer.disable_cache()
    apply_token_merging(pipe, **asked)
    assert torch.isfinite(pipe()).all()


@either_order
@pytest.mark.parametrize("cache", INSIDE_BLOCKS)
@pytest.mark.parametrize("config", [ToMeConfig(ratio=0.5), ToMeConfig(ratio=0.5, scope="block"), KEEPS])
def test_caches_inside_blocks_run_where_all_steps_merge_as_many_tokens(cache_first, cache, config):
    pipe = Pipe()
    apply_both(pipe, {"config": config}, cache(pipe), cache_first)


@either_order
@pytest.mark.parametrize("cache", AROUND_BLOCKS)
@pytest.mark.parametrize("asked", [{"ratio": 0.5}, {"config": CHANGES}])
def test_caches_around_blocks_run_with_any_number_of_tokens(cache_first, cache, asked):
    pipe = Pipe()
    apply_both(pipe, asked, cache(pipe), cache_first)


@pytest.mark.parametrize("inside", [False, True])
def test_a_cache_around_a_layer_that_merges_gets_all_of_its_tokens(inside):
    """A cache inside the layer does not."""
    pipe = Pipe()
    within = r"transformer_blocks\.\d\.attn" + (r"\.to_out\.0" if inside else "")
    config = ToMeConfig(ratio=0.5, correction=Correction(every=2))
    pipe.transformer.enable_cache(taylor_seer(pipe, inside=within))
    if not inside:
        apply_token_merging(pipe, config)
        pipe()
        return
    with pytest.raises(
        UnsupportedModelError, match=r"^transformer_blocks.0.attn.to_out.0: correction.every=2"
    ):
        apply_token_merging(pipe, config)


@either_order
@pytest.mark.parametrize("cache", [*INSIDE_BLOCKS, *AROUND_BLOCKS])
def test_the_default_method_refuses_all_caches_of_diffusers(cache_first, cache):
    pipe = Pipe()
    error = refusal(pipe, {"speedup": 2}, cache(pipe), cache_first)
    assert re.match(r"\w.*: the default method leaves .*: model.disable_cache\(\), or", error)


def pyramid_in_unet(unet: nn.Module) -> None:
    settings = PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500
    )
    apply_pyramid_attention_broadcast(unet, settings)


def faster_in_unet(unet: nn.Module) -> None:
    settings = FasterCacheConfig(is_guidance_distilled=True, current_timestep_callback=lambda: 500)
    apply_faster_cache(unet, settings)


def first_block_in_sd3(model: nn.Module) -> None:
    # The last block returns no text, which the cache needs.
    blocks = model.transformer_blocks
    model.transformer_blocks = nn.ModuleList(blocks[:-1])
    apply_first_block_cache(model, FirstBlockCacheConfig(threshold=0.1))
    model.transformer_blocks = blocks


@pytest.mark.parametrize(
    ("name", "enable"),
    [
        ("UNet2DConditionModel", pyramid_in_unet),
        ("UNet2DConditionModel", faster_in_unet),
        ("SD3Transformer2DModel", first_block_in_sd3),
    ],
)
def test_the_error_takes_off_a_cache_of_a_model_that_cannot_disable_it(name, enable):
    model = hosts.unet() if name == "UNet2DConditionModel" else FAMILIES[name].build()
    assert not hasattr(model, "disable_cache")
    enable(model)
    config = ToMeConfig(ratio=0.5, reuse=StepReuse(every=2))
    with pytest.raises(UnsupportedModelError) as refused:
        apply_token_merging(model, config)
    (statement,) = re.findall("remove that cache first: (.*), or ", str(refused.value))
    exec(statement, {"diffusers": diffusers, "model": model})
    registries = [vars(module).get("_diffusers_hook") for module in model.modules()]
    assert not any(registry.hooks for registry in registries if registry is not None)
    apply_token_merging(model, config)


def deep_cache(model: nn.Module, pipe: Any) -> Callable[[], None]:
    """Enable DeepCache, and return what its error says to call."""
    helper = pytest.importorskip("DeepCache").DeepCacheSDHelper(pipe=pipe)
    helper.set_params(cache_interval=3, cache_branch_id=0)
    helper.enable()
    return helper.disable


def cache_dit(model: nn.Module, pipe: Any) -> Callable[[], None]:
    """Enable cache-dit, and return what its error says to call."""
    package = pytest.importorskip("cache_dit")
    pattern = package.ForwardPattern.Pattern_1
    adapter = package.BlockAdapter(
        pipe=None,
        transformer=model,
        blocks=[model.transformer_blocks, model.single_transformer_blocks],
        forward_pattern=[pattern, pattern],
        check_forward_pattern=False,
    )
    package.enable_cache(adapter)
    return lambda: package.disable_cache(adapter)


@either_order
@pytest.mark.parametrize(
    ("enable", "way_out"),
    [(deep_cache, r"helper.disable\(\)"), (cache_dit, r"cache_dit.disable_cache\(pipe\)")],
)
def test_the_error_takes_off_a_cache_of_another_package(cache_first, enable, way_out):
    if enable is deep_cache:
        model = hosts.unet()
        pipe = SimpleNamespace(unet=model, scheduler=DDIMScheduler())
        arguments = hosts.inputs()
    else:
        model = FLUX.build().eval()
        pipe = SimpleNamespace(transformer=model, scheduler=FlowMatchEulerDiscreteScheduler())
        arguments = FLUX.inputs(1, 8, 8)
    dense = hosts.call(model, **arguments)
    refused = pytest.raises(UnsupportedModelError, match=f"take it off first: {way_out}, or pass settings")
    if cache_first:
        disable = enable(model, pipe)
        with refused:
            apply_token_merging(pipe, speedup=2)
        disable()
        patch = apply_token_merging(pipe, speedup=2)
        patch.at_step(0, 6)
    else:
        patch = apply_token_merging(pipe, speedup=2)
        patch.at_step(0, 6)
        disable = enable(model, pipe)
        with refused:
            hosts.call(model, **arguments)
        disable()
    hosts.call(model, **arguments)
    remove_token_merging(pipe)
    assert torch.equal(hosts.call(model, **arguments), dense)
