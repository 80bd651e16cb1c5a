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
from tokenmerge_tools.variants.generation import (
    Generation,
    as_before,
    check_pipeline,
    in_each_call,
    sample_of,
    transformer_blocks,
)

_CALIBRATED_AT = 28  # steps; diffusers interpolates MagCache's ratios to other numbers


@contextlib.contextmanager
def deepcache(pipe: Any, config: None, interval: float) -> Iterator[None]:
    """Run the whole UNet only every ``interval`` steps, with the package DeepCache.

    The last layer of the last up block runs at every step. Source: arXiv 2312.00858.
    """
    check_pipeline("deepcache", pipe)
    interval = _whole("deepcache: interval", interval)
    if not hasattr(getattr(pipe, "unet", None), "down_blocks"):
        raise UnsupportedModelError(
            f"deepcache needs a UNet, and {type(pipe).__name__} has none; leave it out"
        )
    helper = importlib.import_module("DeepCache").DeepCacheSDHelper(pipe=pipe)
    helper.set_params(cache_interval=interval, cache_branch_id=0)
    with as_before(pipe.unet):  # DeepCache restores methods as attributes of the instance
        helper.enable()
        try:
            yield
        finally:
            helper.disable()


def of_diffusers(
    name: str,
    apply: Callable[..., None],
    pipe: Any,
    config: None,
    *,
    in_blocks: bool = True,
    one_pass: bool = False,
    **settings: float,
) -> contextlib.AbstractContextManager[None]:
    """Apply a cache of diffusers by its own functions, also to a model that has no ``enable_cache``.

    Such a model is Stable Diffusion 3's. ``apply`` adds the hooks in one generation. Those ``in_blocks`` need
    transformer blocks that diffusers knows. A cache for ``one_pass`` has one state, which the two calls of a
    pipeline that guides in two would mix up.
    """
    known: dict[str, Any] = {}  # what outlives a generation

    @contextlib.contextmanager
    def begin(now: Generation) -> Iterator[None]:
        from diffusers import CacheMixin, hooks

        model: Any = now.model
        model.__dict__.pop("_diffusers_hook", None)  # of earlier generations, with a stale list of hooks
        try:
            apply(now, known, **settings)
        except AttributeError as error:
            if "diffusers.hooks" not in str(error):
                raise
            now.refuse(f"needs a newer version of diffusers ({error})")
        if not any(getattr(module, "_diffusers_hook", None) for module in model.modules()):
            now.refuse(f"does not know the layers of {type(model).__name__}")
        contexts = contextlib.ExitStack()

        def before(*_: Any) -> None:
            if one_pass and now.turn > 0:
                now.refuse("keeps one state, and this pipeline guides in two calls for each step")
            contexts.close()
            facts: dict[str, Any] = {}
            if hasattr(hooks, "apply_sea_cache"):  # with it came the facts about the step
                facts = {"step_index": now.index, "num_inference_steps": now.steps, "sigma": now.sigma()}
            contexts.enter_context(CacheMixin.cache_context(model, f"pass {now.turn}", **facts))

        handle = model.register_forward_pre_hook(before)
        try:
            yield
        finally:
            contexts.close()
            handle.remove()

    checks = (transformer_blocks,) if in_blocks else ()
    return in_each_call(name, pipe, begin, *checks)


@contextlib.contextmanager
def _blocks_with_text(now: Generation) -> Iterator[nn.Module]:
    """Hide the last block of Stable Diffusion 3 from caches that need its text. It always runs then."""
    model: Any = now.model
    blocks = getattr(model, "transformer_blocks", None)
    if blocks is not None:
        model.transformer_blocks = nn.ModuleList(
            b for b in blocks if not getattr(b, "context_pre_only", False)
        )
    try:
        yield model
    finally:
        if blocks is not None:
            model.transformer_blocks = blocks


def first_block(now: Generation, known: dict[str, Any], threshold: float) -> None:
    """Skip all blocks but the first while its residual differs by less than ``threshold``: First Block Cache.

    Source: ParaAttention.
    """
    from diffusers import hooks

    with _blocks_with_text(now) as model:
        hooks.apply_first_block_cache(model, hooks.FirstBlockCacheConfig(threshold=threshold))


def taylorseer(now: Generation, known: dict[str, Any], interval: float) -> None:
    """Extrapolate the outputs of attention on all but every ``interval``-th step (arXiv 2503.06923)."""
    from diffusers import hooks

    dtype = next(now.model.parameters()).dtype
    every = _whole("taylorseer: interval", interval)
    hooks.apply_taylorseer_cache(
        now.model, hooks.TaylorSeerCacheConfig(cache_interval=every, taylor_factors_dtype=dtype)
    )


def magcache(now: Generation, known: dict[str, Any], threshold: float) -> None:
    """Skip all blocks while the product of measured ratios of residuals is close to 1 (arXiv 2506.09045).

    The ratios are measured once, in a generation of 28 complete steps.
    """
    from diffusers import hooks

    if "ratios" not in known:
        copied: Any = twin(now.pipe)
        other = Generation(now.name, copied)
        for registered in (other.model._forward_hooks, other.model._forward_pre_hooks):
            registered.clear()  # those that count what the model does
        every = hooks.MagCacheConfig(calibrate=True, num_inference_steps=_CALIBRATED_AT)
        with _blocks_with_text(other) as model:
            hooks.apply_mag_cache(model, every)
        own = torch.Generator().manual_seed(0)
        with contextlib.redirect_stdout(
            io.StringIO()
        ) as printed:  # the only way by which diffusers tells them
            now.again(copied, num_inference_steps=_CALIBRATED_AT, generator=own, callback_on_step_end=None)
        lists = re.findall(r"^\[[\d., e+-]+\]$", printed.getvalue(), flags=re.MULTILINE)
        if not lists:
            now.refuse(f"measured no ratios in a generation of {_CALIBRATED_AT} steps")
        known["ratios"] = torch.tensor(ast.literal_eval(lists[0]))
    steps = int(now.arguments["num_inference_steps"])
    settings = hooks.MagCacheConfig(
        threshold=threshold, num_inference_steps=steps, mag_ratios=known["ratios"]
    )
    with _blocks_with_text(now) as model:
        hooks.apply_mag_cache(model, settings)


def seacache(now: Generation, known: dict[str, Any], threshold: float) -> None:
    """Skip all blocks while the noise-filtered latents change by less than ``threshold`` (2602.18993)."""
    from diffusers import hooks

    def latents(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        sample = sample_of(args, kwargs)
        if sample.ndim == 3:  # tokens of a picture, [b, n, c]
            count, height, width = sample.shape[1], now.arguments["height"], now.arguments["width"]
            rows = round(math.sqrt(count * height / width))
            if rows * (count // rows) != count:
                now.refuse(f"does not know the grid of {count} tokens")
            sample = sample.unflatten(1, (rows, -1)).movedim(-1, 1)
        return list(sample.unsqueeze(2) if sample.ndim == 4 else sample)

    with _blocks_with_text(now) as model:
        hooks.apply_sea_cache(model, hooks.SeaCacheConfig(threshold=threshold, raw_vision_callback=latents))


def fastercache(now: Generation, known: dict[str, Any], interval: float) -> None:
    """Reuse attention, and most passes without the prompt, in later steps (arXiv 2410.19355)."""
    from diffusers import hooks
    from diffusers.hooks import faster_cache

    every = _whole("fastercache: interval", interval)
    model = type(now.model).__name__
    also = (*faster_cache._UNCOND_COND_INPUT_KWARGS_IDENTIFIERS, "pooled_projections")
    settings = hooks.FasterCacheConfig(
        spatial_attention_block_skip_range=every,
        tensor_format="BFCHW"
        if "CogVideo" in model
        else "BCFHW"
        if "num_frames" in now.arguments
        else "BCHW",
        is_guidance_distilled=not guides(now.pipe, now.arguments.get("guidance_scale")),
        current_timestep_callback=now.timestep,  # type: ignore[arg-type]
        attention_weight_callback=lambda _: 0.5,
        _unconditional_conditional_input_kwargs_identifiers=also,  # type: ignore[arg-type]
    )
    hooks.apply_faster_cache(now.model, settings)


def pyramid(now: Generation, known: dict[str, Any], interval: float) -> None:
    """Compute attention every ``interval`` steps in the middle of a generation (PAB, arXiv 2408.12588)."""
    from diffusers import hooks

    settings = hooks.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=_whole("pyramid: interval", interval),
        current_timestep_callback=now.timestep,  # type: ignore[arg-type]
    )
    hooks.apply_pyramid_attention_broadcast(now.model, settings)


def _whole(name: str, number: float) -> int:
    if number < 2 or number != int(number):
        raise ConfigError(f"{name}: expected an integer ≥ 2, got {number:g}")
    return int(number)
