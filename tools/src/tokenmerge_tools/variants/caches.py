"""Rivals by the code of other packages: DeepCache, the caches of diffusers, and cache-dit (DBCache)."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tokenmerge.errors import ConfigError, UnsupportedModelError
from tokenmerge_tools.pipelines.loading import denoiser_of, guides, quiet_loggers, twin
from tokenmerge_tools.variants import generation
from tokenmerge_tools.variants.generation import Generation, check_pipeline, in_each_call

_CALIBRATED_AT = 28  # steps; diffusers interpolates MagCache's ratios to other numbers


@contextlib.contextmanager
def deepcache(pipe: Any, config: None, interval: float) -> Iterator[None]:
    """Run the whole UNet only every ``interval`` steps (arXiv 2312.00858).

    The last layer of the last up block runs at every step.
    """
    generation.check_pipeline("deepcache", pipe)
    interval = _whole("deepcache", interval)
    if not hasattr(getattr(pipe, "unet", None), "down_blocks"):
        raise UnsupportedModelError(
            f"deepcache needs a UNet, and {type(pipe).__name__} has none; leave it out"
        )
    helper = importlib.import_module("DeepCache").DeepCacheSDHelper(pipe=pipe)
    helper.set_params(cache_interval=interval, cache_branch_id=0)
    with generation.as_before(pipe.unet):  # DeepCache restores methods as attributes of the instance
        helper.enable()
        try:
            yield
        finally:
            helper.disable()


# A function that makes the config of a cache. It takes diffusers.hooks, the call, the rival's number, and a
# dictionary that outlives the call.
Settings = Callable[[Any, Generation, float, dict[str, Any]], Any]


def of_diffusers(
    name: str,
    apply: str,
    settings: Settings,
    pipe: Any,
    config: None,
    *,
    in_blocks: bool = True,
    one_pass: bool = False,
    **number: float,
) -> contextlib.AbstractContextManager[None]:
    """Apply a cache of diffusers by its own function, also to SD3, which has no ``enable_cache``.

    A cache that is ``in_blocks`` needs transformer blocks that diffusers knows. A cache for ``one_pass`` has
    only one state. A pipeline that guides in two calls for each step would mix it up.
    """
    known: dict[str, Any] = {}

    @contextlib.contextmanager
    def begin(now: Generation) -> Iterator[None]:
        from diffusers import CacheMixin, hooks

        model: Any = now.model
        model.__dict__.pop("_diffusers_hook", None)  # from an earlier generation, with a stale list of hooks
        if not hasattr(hooks, apply):
            now.refuse(f"needs a newer version of diffusers, with {apply}")
        cache_config = settings(hooks, now, next(iter(number.values())), known)
        with _blocks_with_text(model) if in_blocks else contextlib.nullcontext():
            getattr(hooks, apply)(model, cache_config)
        if not any(getattr(module, "_diffusers_hook", None) for module in model.modules()):
            now.refuse(f"does not know the layers of {type(model).__name__}")
        context = contextlib.ExitStack()

        def before(*_: Any) -> None:
            if one_pass and now.turn > 0:
                now.refuse("keeps one state, and this pipeline guides in two calls for each step")
            context.close()
            facts: dict[str, Any] = {}
            if hasattr(hooks, "apply_sea_cache"):  # newer versions take these facts
                facts = {"step_index": now.index, "num_inference_steps": now.steps, "sigma": now.sigma()}
            context.enter_context(CacheMixin.cache_context(model, f"pass {now.turn}", **facts))

        with contextlib.ExitStack() as in_force:
            in_force.callback(model.register_forward_pre_hook(before).remove)
            in_force.enter_context(context)
            yield

    checks = (generation.transformer_blocks,) if in_blocks else ()
    return generation.in_each_call(name, pipe, begin, *checks)


@contextlib.contextmanager
def _blocks_with_text(model: Any) -> Iterator[None]:
    """Hide the last block of Stable Diffusion 3 from caches that need its text. It always runs then."""
    blocks = getattr(model, "transformer_blocks", ())
    with_text = [block for block in blocks if not getattr(block, "context_pre_only", False)]
    if with_text:
        model.transformer_blocks = nn.ModuleList(with_text)
    try:
        yield
    finally:
        if with_text:
            model.transformer_blocks = blocks


def first_block(hooks: Any, now: Generation, threshold: float, known: dict[str, Any]) -> Any:
    """Skip all blocks but the first while its residual changes by less than the threshold (ParaAttention)."""
    return hooks.FirstBlockCacheConfig(threshold=threshold)


def taylorseer(hooks: Any, now: Generation, interval: float, known: dict[str, Any]) -> Any:
    """Extrapolate the outputs of attention on all but every n-th step (arXiv 2503.06923)."""
    dtype = next(now.model.parameters()).dtype
    every = _whole("taylorseer", interval)
    return hooks.TaylorSeerCacheConfig(cache_interval=every, taylor_factors_dtype=dtype)


def magcache(hooks: Any, now: Generation, threshold: float, known: dict[str, Any]) -> Any:
    """Skip all blocks while the product of measured ratios of residuals is close to 1 (arXiv 2506.09045)."""
    if "ratios" not in known:
        copied: Any = twin(now.pipe)
        model: Any = Generation(now.name, copied).model
        for registered in (model._forward_hooks, model._forward_pre_hooks):
            registered.clear()  # these would count the calls of the copy too
        with _blocks_with_text(model):
            hooks.apply_mag_cache(
                model, hooks.MagCacheConfig(calibrate=True, num_inference_steps=_CALIBRATED_AT)
            )
        generator = torch.Generator().manual_seed(0)
        with contextlib.redirect_stdout(io.StringIO()) as printed:  # diffusers only prints the ratios
            now.again(
                copied, num_inference_steps=_CALIBRATED_AT, generator=generator, callback_on_step_end=None
            )
        lists = re.findall(r"^\[[\d., e+-]+\]$", printed.getvalue(), flags=re.MULTILINE)
        if not lists:
            now.refuse(f"measured no ratios in a generation of {_CALIBRATED_AT} steps")
        known["ratios"] = torch.tensor(ast.literal_eval(lists[0]))
    steps = int(now.arguments["num_inference_steps"])
    return hooks.MagCacheConfig(threshold=threshold, num_inference_steps=steps, mag_ratios=known["ratios"])


def seacache(hooks: Any, now: Generation, threshold: float, known: dict[str, Any]) -> Any:
    """Skip all blocks while the noise-filtered latents change by less than the threshold (2602.18993)."""

    def latents(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        sample = generation.sample_of(args, kwargs)
        if sample.ndim == 3:  # the sample is the tokens of an image, [b, n, c]
            count = sample.shape[1]
            height = now.arguments["height"]
            width = now.arguments["width"]
            rows = round(math.sqrt(count * height / width))
            if rows * (count // rows) != count:
                now.refuse(f"does not know the grid of {count} tokens")
            sample = sample.unflatten(1, (rows, -1)).movedim(-1, 1)
        return list(sample.unsqueeze(2) if sample.ndim == 4 else sample)

    return hooks.SeaCacheConfig(threshold=threshold, raw_vision_callback=latents)


def fastercache(hooks: Any, now: Generation, interval: float, known: dict[str, Any]) -> Any:
    """Reuse attention, and most passes without the prompt, in later steps (arXiv 2410.19355)."""
    video = "BFCHW" if "CogVideo" in type(now.model).__name__ else "BCFHW"
    doubled = hooks.faster_cache._UNCOND_COND_INPUT_KWARGS_IDENTIFIERS
    return hooks.FasterCacheConfig(
        spatial_attention_block_skip_range=_whole("fastercache", interval),
        tensor_format=video if "num_frames" in now.arguments else "BCHW",
        is_guidance_distilled=not guides(now.pipe, now.arguments.get("guidance_scale")),
        current_timestep_callback=now.timestep,
        attention_weight_callback=lambda _: 0.5,
        _unconditional_conditional_input_kwargs_identifiers=(*doubled, "pooled_projections"),
    )


def pyramid(hooks: Any, now: Generation, interval: float, known: dict[str, Any]) -> Any:
    """Compute attention only every n-th step in the middle of a generation (PAB, arXiv 2408.12588)."""
    return hooks.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=_whole("pyramid", interval), current_timestep_callback=now.timestep
    )


def _whole(name: str, interval: float) -> int:
    if interval < 2 or interval != int(interval):
        raise ConfigError(f"{name}: interval: expected an integer ≥ 2, got {interval:g}")
    return int(interval)


_NAME = "cache-dit"
FORECASTS = {"dmd": "DMDCalibratorConfig", "foca": "FoCaCalibratorConfig"}
MASKS = ("slow", "medium", "fast", "ultra")
# By default, cache-dit computes the first 8 steps, and the first 8 blocks of each step. Its examples with 8
# and 4 steps compute half of the steps. Here, the first blocks are at most a sixth of the model's blocks.
_WARM_UP = 8
_FIRST = 8
_BLOCKS_PER_FIRST = 6
# cache-dit has masks for all numbers of steps from 8 on, and for two smaller numbers.
_MASKED_FROM = 8
_MASKED_TOO = (4, 6)


def cache_dit(
    pipe: Any,
    config: None,
    threshold: float,
    taylor: float | None = None,
    forecast: str | None = None,
    mask: str | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Skip all but the first blocks on steps where the residual of these blocks changed little: cache-dit.

    The first sixth of the blocks, at least 1 and at most 8, runs in every step. A skipped block adds its
    residual of the last full step again. The first 8 steps are full, or the first half of a generation of
    fewer than 16 steps.

    - threshold: relative mean absolute difference below which the other blocks are skipped, > 0. A higher
      threshold is faster and less close to dense. From 1 on, they are skipped whatever the difference.
    - taylor: order of the Taylor series that extrapolates the residual (TaylorSeer, arXiv 2503.06923), an
      integer ≥ 1. With None, the residual is not extrapolated.
    - forecast: one of :data:`FORECASTS`, another extrapolation of the residual: dynamic mode decomposition or
      Forecast then Calibrate (arXiv 2508.16211).
    - mask: one of :data:`MASKS`: cache-dit's list of steps that are always full, in place of the first
      ones, for 4, 6, and 8 or more steps. A faster mask has fewer of them.
    """
    check_pipeline(_NAME, pipe)
    if taylor is not None and (taylor < 1 or taylor != int(taylor)):
        raise ConfigError(f"{_NAME}: taylor: expected an integer ≥ 1, got {taylor:g}")
    if forecast is not None and (forecast not in FORECASTS or taylor is not None):
        raise ConfigError(
            f"{_NAME}: forecast: expected one of {', '.join(FORECASTS)}, without taylor, got {forecast!r}"
        )
    if mask is not None and mask not in MASKS:
        raise ConfigError(f"{_NAME}: mask: expected one of {', '.join(MASKS)}, got {mask!r}")
    package: Any = importlib.import_module("cache_dit")
    with quiet_loggers("cache_dit", "CACHE_DIT"):
        known = package.BlockAdapterRegister.is_supported(pipe)
    if not known or not isinstance(denoiser_of(pipe), nn.Module):
        raise UnsupportedModelError(f"{_NAME} does not support {type(pipe).__name__}; leave {_NAME} out")

    def settings(steps: int, blocks: int) -> dict[str, Any]:
        if mask is not None and steps < _MASKED_FROM and steps not in _MASKED_TOO:
            raise ConfigError(
                f"{_NAME}: mask: expected 4, 6, or 8 or more steps, got {steps}; leave the mask out, or "
                "change the number of steps"
            )
        half = math.ceil(steps / 2)
        cache = package.DBCacheConfig(
            Fn_compute_blocks=max(1, min(_FIRST, blocks // _BLOCKS_PER_FIRST)),
            residual_diff_threshold=threshold,
            max_warmup_steps=min(_WARM_UP, half),
            steps_computation_mask=mask and package.steps_mask(total_steps=steps, mask_policy=mask),
        )
        if taylor is None and forecast is None:
            return {"cache_config": cache}
        # Text is not extrapolated: the last block of some models returns none, which cache-dit cannot store.
        kind = "TaylorSeerCalibratorConfig" if forecast is None else FORECASTS[forecast]
        order = {} if taylor is None else {"taylorseer_order": int(taylor)}
        forecaster = getattr(package, kind)(enable_encoder_calibrator=False, **order)
        return {"cache_config": cache, "calibrator_config": forecaster}

    @contextlib.contextmanager
    def begin(now: Generation) -> Iterator[None]:
        cached = now.pipe
        try:
            with quiet_loggers("cache_dit", "CACHE_DIT"):
                adapter = package.get_adapter(cached)
                blocks = sum(map(len, adapter.flatten([adapter.blocks])))
                package.enable_cache(adapter, **settings(now.arguments["num_inference_steps"], blocks))
            cached = adapter  # cache-dit leaves statistics in the lists of blocks
            yield
        finally:
            with quiet_loggers("cache_dit", "CACHE_DIT"):
                package.disable_cache(cached)

    return in_each_call(_NAME, pipe, begin)
