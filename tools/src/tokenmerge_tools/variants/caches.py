"""Block caching baselines, which reuse results of one denoising step in the next ones."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from tokenmerge.errors import ConfigError, UnsupportedModelError
from tokenmerge_tools.pipelines.loading import denoiser_of


@contextlib.contextmanager
def deepcache(pipe: Any, config: None, interval: float) -> Iterator[None]:
    """Run the whole UNet only every ``interval`` steps, with the package DeepCache.

    The last layer of the last up block runs at every step. Source: arXiv 2312.00858.
    """
    check_pipeline("deepcache", pipe)
    if interval < 2 or interval != int(interval):
        raise ConfigError(f"deepcache: interval: expected an integer ≥ 2, got {interval:g}")
    if not hasattr(getattr(pipe, "unet", None), "down_blocks"):
        raise UnsupportedModelError(
            f"deepcache needs a UNet, and {type(pipe).__name__} has none; leave it out"
        )
    helper = importlib.import_module("DeepCache").DeepCacheSDHelper(pipe=pipe)
    helper.set_params(cache_interval=int(interval), cache_branch_id=0)
    before = [module for module in pipe.unet.modules() if "forward" not in module.__dict__]
    helper.enable()
    try:
        yield
    finally:
        helper.disable()
        for module in before:  # DeepCache restores methods as attributes of the instance
            module.__dict__.pop("forward", None)


@contextlib.contextmanager
def first_block_cache(pipe: Any, config: None, threshold: float) -> Iterator[None]:
    """Skip all blocks but the first on steps where the first block's residual changed little.

    This is the implementation of diffusers. It is also used for Stable Diffusion 3, for which diffusers does
    not offer it. There the last block always runs, because it returns no text. Source: ParaAttention's First
    Block Cache.

    ``threshold`` is the relative mean absolute difference up to which blocks are skipped. A higher threshold
    is faster and less close to dense.
    """
    from diffusers import CacheMixin, FirstBlockCacheConfig

    check_pipeline("first-block-cache", pipe)
    model = denoiser_of(pipe)
    if isinstance(model, CacheMixin):
        cached: Any = model
    else:
        cached = type("Blocks", (nn.Module, CacheMixin), {})()
        cached.transformer_blocks = _blocks_with_text(model)
    try:
        cached.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    except (IndexError, ValueError) as error:  # no list of blocks, or unknown blocks
        raise UnsupportedModelError(
            f"first-block-cache: diffusers does not know the transformer blocks of {type(model).__name__}; "
            "leave it out"
        ) from error
    with contextlib.ExitStack() as in_force:
        in_force.callback(cached.disable_cache)
        if cached is not model:
            # diffusers resets the cache only in models that support it.
            generation = in_force.enter_context(contextlib.ExitStack())

            def begin(*args: object) -> None:
                if not pipe.scheduler.step_index:
                    generation.close()
                    cached._reset_stateful_cache()
                    generation.enter_context(cached.cache_context("all"))

            in_force.callback(model.register_forward_pre_hook(begin).remove)
        yield


def _blocks_with_text(model: nn.Module) -> nn.ModuleList:
    blocks = getattr(model, "transformer_blocks", ())
    return nn.ModuleList(block for block in blocks if not getattr(block, "context_pre_only", False))


def check_pipeline(name: str, pipe: object) -> None:
    """Raise a ConfigError if a baseline that follows the denoising steps gets only a denoiser."""
    if isinstance(pipe, nn.Module):
        raise ConfigError(f"{name} needs the denoising steps of a pipeline; use --scope pipeline")
