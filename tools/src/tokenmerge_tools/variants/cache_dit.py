"""The baseline cache-dit: Dual Block Cache (DBCache)."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from tokenmerge.errors import ConfigError, UnsupportedModelError
from tokenmerge_tools.pipelines.loading import denoiser_of
from tokenmerge_tools.variants.caches import check_pipeline

_NAME = "cache-dit"
MASKS = ("slow", "medium", "fast", "ultra")
# By default, cache-dit computes the first 8 steps, and the first 8 blocks of each step. Its examples with 8
# and 4 steps compute half of the steps. Here, the first blocks are at most a sixth of the model's blocks.
_WARM_UP, _FIRST, _BLOCKS_PER_FIRST = 8, 8, 6
_MASKED_FROM, _MASKED_TOO = 8, (4, 6)  # numbers of steps for which cache-dit has masks


@contextlib.contextmanager
def cache_dit(
    pipe: Any,
    config: None,
    threshold: float,
    taylor: float | None = None,
    mask: str | None = None,
) -> Iterator[None]:
    """Skip all but the first blocks on steps where the residual of these blocks changed little: cache-dit.

    The first sixth of the blocks, at least 1 and at most 8, runs in every step. If its residual is close to
    that of the last complete step, the other blocks are skipped, and their residual of that step is added
    again.
    The first 8 steps are complete, or the first half of a generation of fewer than 16 steps.

    - threshold: relative mean absolute difference below which the other blocks are skipped, > 0. A higher
      threshold is faster and less close to dense. From 1 on, they are skipped whatever the difference.
    - taylor: order of the Taylor series that extrapolates the residual (TaylorSeer, arXiv 2503.06923), an
      integer ≥ 1. None: the residual is not extrapolated.
    - mask: one of :data:`MASKS`: cache-dit's list of steps that are always complete, in place of the first
      ones, for 4, 6, and 8 or more steps. A faster mask has fewer of them.
    """
    check_pipeline(_NAME, pipe)
    if taylor is not None and (taylor < 1 or taylor != int(taylor)):
        raise ConfigError(f"{_NAME}: taylor: expected an integer ≥ 1, got {taylor:g}")
    if mask is not None and mask not in MASKS:
        raise ConfigError(f"{_NAME}: mask: expected one of {', '.join(MASKS)}, got {mask!r}")
    package: Any = importlib.import_module("cache_dit")
    with _quiet():
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
        if taylor is None:
            return {"cache_config": cache}
        # Text is not extrapolated: the last block of some models returns none, which cache-dit cannot store.
        order = package.TaylorSeerCalibratorConfig(
            taylorseer_order=int(taylor), enable_encoder_calibrator=False
        )
        return {"cache_config": cache, "calibrator_config": order}

    with _in_each_call(pipe, package, settings):
        yield


@contextlib.contextmanager
def _in_each_call(pipe: Any, package: Any, settings: Callable[[int, int], dict[str, Any]]) -> Iterator[None]:
    """Enable cache-dit in each call of the pipeline, with settings for its numbers of steps and blocks.

    cache-dit changes the class of the pipeline. Each call therefore has a class of its own, so that other
    pipelines of the same class do not change.
    """
    cls: Any = type(pipe)
    parameters = inspect.signature(cls.__call__)

    @functools.wraps(cls.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = parameters.bind(self, *args, **kwargs)
        bound.apply_defaults()
        model: nn.Module = denoiser_of(self)
        before = {module: dict(module.__dict__) for module in model.modules()}
        added: dict[nn.Module, set[str]] = {}
        cached: Any = self
        of_variant = type(self)
        self.__class__ = _subclass(cls, {})
        try:
            with _quiet():
                adapter = package.get_adapter(self)
                blocks = sum(map(len, adapter.flatten([adapter.blocks])))
                package.enable_cache(adapter, **settings(bound.arguments["num_inference_steps"], blocks))
            cached = adapter  # it has the lists of blocks, in which cache-dit leaves statistics
            added = {module: set(module.__dict__) - set(old) for module, old in before.items()}
            return self(*args, **kwargs)
        finally:
            with _quiet():
                package.disable_cache(cached)
            _put_back(before, added)
            self.__class__ = of_variant

    pipe.__class__ = _subclass(cls, {"__call__": call})
    try:
        yield
    finally:
        pipe.__class__ = cls


def _subclass(cls: type, methods: dict[str, Any]) -> Any:
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, **methods})


def _put_back(before: dict[nn.Module, dict[str, Any]], added: dict[nn.Module, set[str]]) -> None:
    """Undo what cache-dit leaves in the modules: attributes that it added, and another ``forward``."""
    for module, names in added.items():
        for name in names:
            module.__dict__.pop(name, None)
        if "forward" in before[module]:
            module.__dict__["forward"] = before[module]["forward"]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep cache-dit from writing on standard output, except for errors."""
    own = [
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if name.startswith(("cache_dit", "CACHE_DIT")) and isinstance(logger, logging.Logger)
    ]
    levels = [logger.level for logger in own]
    for logger in own:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(own, levels, strict=True):
            logger.setLevel(level)
