"""The baseline cache-dit: Dual Block Cache (DBCache), alone or with tokens merged in the blocks that run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from tokenmerge.api import token_merging
from tokenmerge.auto import choose
from tokenmerge.errors import ConfigError, UnsupportedModelError
from tokenmerge.measure.bench.baselines import check_pipeline
from tokenmerge.measure.pipelines.loading import denoiser_of

_NAME = "cache-dit"
MASKS = ("slow", "medium", "fast", "ultra")
SCOPES = ("layers", "block")
# By default, cache-dit computes the first 8 steps, and the first 8 blocks of each step. Its examples of 8 and
# 4 steps compute half of them. Models of fewer blocks than its own compute fewer here.
_WARM_UP, _FIRST, _BLOCKS_PER_FIRST = 8, 8, 6
_MASKED_FROM, _MASKED_TOO = 8, (4, 6)  # numbers of steps for which cache-dit has masks


@contextlib.contextmanager
def cache_dit(
    pipe: Any,
    config: None,
    report: None,
    threshold: float,
    taylor: float | None = None,
    mask: str | None = None,
    merge: float | None = None,
    scope: str = "layers",
) -> Iterator[None]:
    """Skip all but the first blocks in steps where these add what they added before: cache-dit.

    The first sixth of the blocks, at most 8, run in every step. If they add nearly what they added in the
    last full step, the others are skipped, and what they added then is added again. The first 8 steps, or the
    first half of a shorter generation, are full.

    Args:
        pipe: the pipeline.
        config: not used.
        report: not used.
        threshold: relative mean absolute difference below which the other blocks are skipped, > 0. Raising it
            is faster and less close to dense. From 1 on, they are skipped whatever the difference.
        taylor: order of the Taylor series by which the added part is extrapolated (TaylorSeer,
            arXiv 2503.06923), 1 or more; None: it is not extrapolated.
        mask: ``"slow"``, ``"medium"``, ``"fast"`` or ``"ultra"``: a list of steps that are full in any case,
            in place of the first ones; the fastest has the fewest. There are lists for 4, 6, and 8 or more
            steps. None: no list.
        merge: fraction of tokens that :mod:`tokenmerge` merges in the blocks that run, > 0 and ≤ 0.75. None:
            none is merged. Raising it is faster and less close to dense.
        scope: what merges: ``"layers"``, the attention, or the whole ``"block"``.

    Raises:
        ConfigError: ``pipe`` is only a denoiser, a setting is out of range, or a generation has a number of
            steps for which there is no mask.
        UnsupportedModelError: cache-dit does not know the pipeline.
    """
    check_pipeline(_NAME, pipe)
    if taylor is not None and (taylor < 1 or taylor != int(taylor)):
        raise ConfigError(f"{_NAME}: taylor: expected an integer ≥ 1, got {taylor:g}")
    if mask is not None and mask not in MASKS:
        raise ConfigError(f"{_NAME}: mask: expected one of {', '.join(MASKS)}, got {mask!r}")
    if scope not in SCOPES:
        raise ConfigError(f"{_NAME}: scope: expected one of {', '.join(SCOPES)}, got {scope!r}")
    package: Any = importlib.import_module("cache_dit")
    with _quiet():
        known = package.BlockAdapterRegister.is_supported(pipe)
    if not known or not isinstance(denoiser_of(pipe), nn.Module):
        raise UnsupportedModelError(f"{_NAME}: it does not know {type(pipe).__name__}; leave it out")

    def settings(steps: int, blocks: int) -> dict[str, Any]:
        if mask is not None and steps < _MASKED_FROM and steps not in _MASKED_TOO:
            raise ConfigError(
                f"{_NAME}: mask: expected 4, 6, or 8 or more steps, got {steps}; leave the mask out, or take "
                "another number of steps"
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

    with contextlib.ExitStack() as in_force:
        if merge is not None:
            # As `auto` merges without step reuse: cache-dit decides which blocks run.
            merging = dataclasses.replace(choose(pipe, merge, follows_steps=False), scope=scope)
            in_force.enter_context(token_merging(pipe, merging))
        in_force.enter_context(_in_each_call(pipe, package, settings))
        yield


@contextlib.contextmanager
def _in_each_call(pipe: Any, package: Any, settings: Callable[[int, int], dict[str, Any]]) -> Iterator[None]:
    """Cache in each call of the pipeline, with settings for its number of steps and the model's blocks.

    cache-dit changes the class of the pipeline. So each call has a class of its own, and other pipelines of
    the class stay as they are.
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
            cached = adapter  # which knows the lists of blocks, where cache-dit leaves statistics
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
