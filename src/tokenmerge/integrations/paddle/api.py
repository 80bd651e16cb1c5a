"""Apply token merging to models of ppdiffusers, and remove it; also with tomesd's arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from paddle import nn
from ppdiffusers import ControlNetModel

from tokenmerge import presets
from tokenmerge.config import ToMeConfig, check_below_highest_ratio, flat
from tokenmerge.errors import ConfigError, NothingToMergeError
from tokenmerge.integrations.paddle.models import find_hosts
from tokenmerge.integrations.paddle.report import PaddleReport, predict
from tokenmerge.integrations.paddle.runtime import STATE, Run, check_swappable, deepest_level, patch, restore
from tokenmerge.integrations.portable import PLANNERS

__all__ = [
    "PaddlePatch",
    "PaddleReport",
    "apply_patch",
    "apply_token_merging",
    "apply_tome",
    "predict",
    "remove_patch",
    "remove_token_merging",
    "remove_tome",
    "token_merging",
]

# Settings with some supported values, and settings with all values supported. The others keep their defaults.
_OFFERED = {"scope": ("layers", "keys"), "planner": PLANNERS}
_FREE = (
    *("ratio", "max_downsample", "min_tokens", "sx", "sy", "seed", "rules"),
    *("merge_attn", "merge_crossattn", "merge_mlp", "combine", "proportional", "merge_sharing.guidance"),
)
_DEFAULTS = flat(vars(ToMeConfig()))

Model = TypeVar("Model")


class PaddlePatch:
    """A handle on a patched model, which :func:`apply_token_merging` returns."""

    def __init__(self, pipe_or_layer: Any, config: ToMeConfig, runs: Sequence[Run]) -> None:
        self._model = pipe_or_layer
        self._config = config
        self._runs = runs

    def report(self, height: int | None = None, width: int | None = None, batch: int = 2) -> PaddleReport:
        """Count what merging does, as :func:`predict` does.

        The size is in pixels, or for a model alone in latents.
        """
        scale = getattr(self._model, "vae_scale_factor", 1)
        if height is not None:
            height //= scale
        if width is not None:
            width //= scale
        return predict(self._model, self._config, height, width, batch)

    def remove(self) -> None:
        """Restore the models. One that was patched again or restored in the meantime stays as it is."""
        for run in self._runs:
            if run.host.root.__dict__.get(STATE) is run:
                restore(run.host.root)

    def __str__(self) -> str:
        return str(self.report())


def apply_token_merging(pipe_or_layer: Any, config: ToMeConfig) -> PaddlePatch:
    """Patch a model of ppdiffusers in place, so that it merges tokens from its next call on.

    If an error is raised, the model stays as it was.

    Args:
        pipe_or_layer: a pipeline (its ControlNets are patched too), or a model such as ``pipe.unet``. A model
            that is already patched gets the new settings.
        config: what to merge and how much. Supported are the planners ``"tome"`` and ``"uniform"``,
            the scopes ``"layers"`` and ``"keys"``, ``combine``, ``rules`` by level, ``min_tokens``,
            ``proportional``, ``merge_sharing.guidance``, and the arguments of
            :func:`tokenmerge.paddle.apply_patch`.

    Returns:
        A handle: ``patch.report()`` says what merges where, ``patch.remove()`` restores the model.

    Raises:
        UnsupportedModelError: the object neither is nor contains a supported model.
        NothingToMergeError: no token would merge with these settings. A ControlNet may stay dense if the
            denoiser merges; the report names it.
        ConfigError: ``config`` is not a configuration, or has a setting that is not supported on Paddle.
    """
    _check_offered(config)
    runs = [Run(config, host) for host in find_hosts(pipe_or_layer)]
    for run in runs:
        check_swappable(run.host)
    # A ControlNet may stay dense next to a denoiser that merges.
    needed = [run for run in runs if not isinstance(run.host.root, ControlNetModel)] or runs
    if not any(run.blocks for run in needed):
        host = needed[0].host
        raise NothingToMergeError(
            f"nothing to merge: no transformer block of {host.name} at the levels to "
            f"{deepest_level(host, config)} has a layer that scope={config.scope!r} and merge_attn, "
            "merge_crossattn and merge_mlp ask for; feed-forward layers that run in chunks stay dense"
        )
    for run in runs:
        restore(run.host.root)
        if run.blocks:
            patch(run)
    return PaddlePatch(pipe_or_layer, config, runs)


def remove_token_merging(pipe_or_layer: Any) -> None:
    """Restore a model exactly as it was. A model that is not patched stays as it is.

    Raises:
        UnsupportedModelError: the object neither is nor contains a supported model.
    """
    for host in find_hosts(pipe_or_layer):
        restore(host.root)


@contextlib.contextmanager
def token_merging(pipe_or_layer: Any, config: ToMeConfig) -> Iterator[PaddlePatch]:
    """Merge tokens within the context, then restore the earlier state, also after an exception.

    The arguments and errors are those of :func:`apply_token_merging`.
    """
    before = [(host.root, host.root.__dict__.get(STATE)) for host in find_hosts(pipe_or_layer)]
    handle = apply_token_merging(pipe_or_layer, config)
    try:
        yield handle
    finally:
        for root, run in before:
            restore(root)
            if run is not None:
                patch(run)


def apply_patch(
    pipe_or_layer: Model,
    ratio: float = 0.5,
    max_downsample: int = 1,
    sx: int = 2,
    sy: int = 2,
    use_rand: bool = True,
    merge_attn: bool = True,
    merge_crossattn: bool = False,
    merge_mlp: bool = False,
) -> Model:
    """Speed up a diffusion model of ppdiffusers in place, with tomesd's arguments and ppdiffusers' meaning.

    The arguments are those of :func:`tokenmerge.apply_patch`. Random destinations depend on the timestep and
    the cell, so the same seed gives the same image and the global generator is not used.

    Raises:
        ConfigError: the ratio is 1 − 1/(sx·sy) or more, or another value is not valid.
        UnsupportedModelError, NothingToMergeError: as :func:`tokenmerge.paddle.apply_token_merging`.
    """
    check_below_highest_ratio(ratio, sx, sy)
    config = presets.tomesd(
        ratio,
        max_downsample=max_downsample,
        sx=sx,
        sy=sy,
        seed=0 if use_rand else None,
        merge_attn=bool(merge_attn),
        merge_crossattn=bool(merge_crossattn),
        merge_mlp=bool(merge_mlp),
    )
    apply_token_merging(pipe_or_layer, config)
    return pipe_or_layer


apply_tome = apply_patch


def remove_patch(pipe_or_layer: Model) -> Model:
    """Restore a model exactly as it was before :func:`apply_patch`, and return it."""
    remove_token_merging(pipe_or_layer)
    return pipe_or_layer


def remove_tome(pipe_or_layer: Model, only_return_self: bool = True) -> Model | tuple[Model, list[nn.Layer]]:
    """Restore a model as :func:`remove_patch` does, with ppdiffusers' signature.

    With ``only_return_self=False``, it also returns the models in it that can be patched.
    """
    remove_patch(pipe_or_layer)
    if only_return_self:
        return pipe_or_layer
    return pipe_or_layer, [host.root for host in find_hosts(pipe_or_layer)]


def _check_offered(config: Any) -> None:
    if not isinstance(config, ToMeConfig):
        raise ConfigError(
            f"config: expected a ToMeConfig such as ToMeConfig(ratio=0.5), got {config!r}; choosing "
            "the other settings for a ratio is supported only on PyTorch"
        )
    for place, rule in enumerate(config.rules):
        if rule.of_steps:
            raise ConfigError(
                f"rules[{place}]: on Paddle a rule can have a level and no other condition, got {rule}; "
                "leave it out, or use a pipeline of diffusers"
            )
    for settings in (config, *(config.at_level(rule.level or 0) for rule in config.rules)):
        for name, value in flat(vars(settings)).items():
            if name in _OFFERED and value not in _OFFERED[name]:
                wanted = ", ".join(map(repr, _OFFERED[name]))
                raise ConfigError(f"{name}: on Paddle expected one of {wanted}, got {value!r}")
            if name not in (*_FREE, *_OFFERED) and value != _DEFAULTS[name]:
                raise ConfigError(
                    f"{name}: not supported on Paddle, got {value!r}; leave it out, or use a pipeline of "
                    "diffusers"
                )
