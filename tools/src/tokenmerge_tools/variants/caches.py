"""Rivals by the code of other packages: DeepCache, and the caches of diffusers."""

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
from tokenmerge_tools.pipelines.loading import guides, twin
from tokenmerge_tools.variants import generation
from tokenmerge_tools.variants.generation import Generation

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


# (diffusers.hooks, the call, the rival's number, what outlives the call) → the config of a cache
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

    Those ``in_blocks`` need transformer blocks that diffusers knows. A cache for ``one_pass`` has one state,
    which the two calls of a pipeline that guides in two would mix up.
    """
    known: dict[str, Any] = {}

    @contextlib.contextmanager
    def begin(now: Generation) -> Iterator[None]:
        from diffusers import CacheMixin, hooks

        model: Any = now.model
        model.__dict__.pop("_diffusers_hook", None)  # of earlier generations, with a stale list of hooks
        if not hasattr(hooks, apply):
            now.refuse(f"needs a newer version of diffusers, with {apply}")
        own = settings(hooks, now, next(iter(number.values())), known)
        with _blocks_with_text(model) if in_blocks else contextlib.nullcontext():
            getattr(hooks, apply)(model, own)
        if not any(getattr(module, "_diffusers_hook", None) for module in model.modules()):
            now.refuse(f"does not know the layers of {type(model).__name__}")
        context = contextlib.ExitStack()

        def before(*_: Any) -> None:
            if one_pass and now.turn > 0:
                now.refuse("keeps one state, and this pipeline guides in two calls for each step")
            context.close()
            facts: dict[str, Any] = {}
            if hasattr(hooks, "apply_sea_cache"):  # with it came the facts about the step
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
    if with_text := [block for block in blocks if not getattr(block, "context_pre_only", False)]:
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
            registered.clear()  # those that count what the model does
        with _blocks_with_text(model):
            hooks.apply_mag_cache(
                model, hooks.MagCacheConfig(calibrate=True, num_inference_steps=_CALIBRATED_AT)
            )
        own = torch.Generator().manual_seed(0)
        with contextlib.redirect_stdout(io.StringIO()) as printed:  # diffusers tells them nowhere else
            now.again(copied, num_inference_steps=_CALIBRATED_AT, generator=own, callback_on_step_end=None)
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
        if sample.ndim == 3:  # tokens of a picture, [b, n, c]
            count, height, width = sample.shape[1], now.arguments["height"], now.arguments["width"]
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
    every = _whole("pyramid", interval)
    return hooks.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=every, current_timestep_callback=now.timestep
    )


def _whole(name: str, interval: float) -> int:
    if interval < 2 or interval != int(interval):
        raise ConfigError(f"{name}: interval: expected an integer ≥ 2, got {interval:g}")
    return int(interval)
