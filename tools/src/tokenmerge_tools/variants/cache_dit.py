"""The baseline cache-dit: Dual Block Cache (DBCache)."""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
from collections.abc import Iterator
from typing import Any

from torch import nn

from tokenmerge.errors import ConfigError, UnsupportedModelError
from tokenmerge_tools.pipelines.loading import denoiser_of
from tokenmerge_tools.variants.generation import Generation, check_pipeline, in_each_call

_NAME = "cache-dit"
FORECASTS = {"dmd": "DMDCalibratorConfig", "foca": "FoCaCalibratorConfig"}
MASKS = ("slow", "medium", "fast", "ultra")
# By default, cache-dit computes the first 8 steps, and the first 8 blocks of each step. Its examples with 8
# and 4 steps compute half of the steps. Here, the first blocks are at most a sixth of the model's blocks.
_WARM_UP, _FIRST, _BLOCKS_PER_FIRST = 8, 8, 6
_MASKED_FROM, _MASKED_TOO = 8, (4, 6)  # numbers of steps for which cache-dit has masks


def cache_dit(
    pipe: Any,
    config: None,
    threshold: float,
    taylor: float | None = None,
    forecast: str | None = None,
    mask: str | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Skip all but the first blocks on steps where the residual of these blocks changed little: cache-dit.

    The first sixth of the blocks, at least 1 and at most 8, runs in every step. If its residual is close to
    that of the last complete step, the other blocks are skipped, and their residual of that step is added
    again.
    The first 8 steps are complete, or the first half of a generation of fewer than 16 steps.

    - threshold: relative mean absolute difference below which the other blocks are skipped, > 0. A higher
      threshold is faster and less close to dense. From 1 on, they are skipped whatever the difference.
    - taylor: order of the Taylor series that extrapolates the residual (TaylorSeer, arXiv 2503.06923), an
      integer ≥ 1. None: the residual is not extrapolated.
    - forecast: one of :data:`FORECASTS`, another extrapolation of the residual: dynamic mode decomposition or
      Forecast then Calibrate (arXiv 2508.16211).
    - mask: one of :data:`MASKS`: cache-dit's list of steps that are always complete, in place of the first
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
        if taylor is None and forecast is None:
            return {"cache_config": cache}
        # Text is not extrapolated: the last block of some models returns none, which cache-dit cannot store.
        kind = "TaylorSeerCalibratorConfig" if forecast is None else FORECASTS[forecast]
        own = {} if taylor is None else {"taylorseer_order": int(taylor)}
        forecaster = getattr(package, kind)(enable_encoder_calibrator=False, **own)
        return {"cache_config": cache, "calibrator_config": forecaster}

    @contextlib.contextmanager
    def begin(now: Generation) -> Iterator[None]:
        cached = now.pipe
        try:
            with _quiet():
                adapter = package.get_adapter(cached)
                blocks = sum(map(len, adapter.flatten([adapter.blocks])))
                package.enable_cache(adapter, **settings(now.arguments["num_inference_steps"], blocks))
            cached = adapter  # it has the lists of blocks, in which cache-dit leaves statistics
            yield
        finally:
            with _quiet():
                package.disable_cache(cached)

    return in_each_call(_NAME, pipe, begin)


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
