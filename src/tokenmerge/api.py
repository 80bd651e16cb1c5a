"""Functions that apply and remove token merging. The type of the config decides the kind of model."""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, overload

from torch import Tensor, nn

from tokenmerge import presets
from tokenmerge.auto import choose_for
from tokenmerge.config import FoundFor, ToMeConfig, dense_outside, load_settings
from tokenmerge.config.origin import is_default
from tokenmerge.errors import ConfigError, UnsupportedModelError, shown
from tokenmerge.handle import DiffusionPatch, EncoderPatch, Patch
from tokenmerge.models.base import Host
from tokenmerge.models.find import DENOISERS, find_hosts
from tokenmerge.ops import Plan
from tokenmerge.report import Report, bytes_of, within
from tokenmerge.runtime.memory.state import RecordedPlan
from tokenmerge.runtime.patching.in_use import refuse_in_use
from tokenmerge.runtime.patching.patch import hosts_that_merge, new_state, patch_host, restore, state_of
from tokenmerge.runtime.patching.watched import look
from tokenmerge.runtime.steps.pipeline import Pipeline
from tokenmerge.speedup import ratio_for
from tokenmerge.vit.config import ViTConfig
from tokenmerge.vit.hosts import find_encoders
from tokenmerge.vit.patch import checked_encoders, new_vit_state, patch_encoder
from tokenmerge.vit.report import ViTReport
from tokenmerge.vit.runtime import RecordedTokens

__all__ = ["Patch", "apply_token_merging", "remove_token_merging", "token_merging"]

_DEFAULT_RATIO = 0.5


@overload
def apply_token_merging(
    pipe_or_model: object,
    config: ToMeConfig | float | str | os.PathLike[str] | None = None,
    *,
    ratio: float | None = None,
    speedup: float | None = None,
    start: float | None = None,
    until: float | None = None,
    max_cache: str | int | None = None,
) -> Patch[Report, RecordedPlan]: ...
@overload
def apply_token_merging(pipe_or_model: object, config: ViTConfig) -> Patch[ViTReport, RecordedTokens]: ...
def apply_token_merging(
    pipe_or_model: object,
    config: ToMeConfig | ViTConfig | float | str | os.PathLike[str] | None = None,
    *,
    ratio: float | None = None,
    speedup: float | None = None,
    start: float | None = None,
    until: float | None = None,
    max_cache: str | int | None = None,
) -> Patch[Any, Any]:
    """Patch a diffusion model or a vision transformer in place, so that it merges tokens.

    If an error is raised, the model stays as it was.

    Args:
        pipe_or_model: for a ToMeConfig, a diffusers pipeline (its ControlNets are patched too), a diffusers
            model such as ``pipe.unet``, or a CompVis-style model. For a ViTConfig, a ViT, DeiT, CLIP, SigLIP
            or DINOv2 model of transformers, a ``VisionTransformer`` of timm, or a pipeline that contains one.
            A model that is already patched gets the new settings.
        config: what to merge and how much. A number is the ratio of tokens to remove (default: 0.5), and
            :func:`tokenmerge.auto.choose` chooses all other settings. A string is the name of a preset of
            :mod:`tokenmerge.presets`, such as ``"toma"``, or the path of a ``.json`` file that
            :func:`tokenmerge.config.save_config` or ``tokenmerge tune`` wrote. If such a file says for which
            model class, size and number of steps its settings were found, other ones give a warning.
        ratio: the same as a number given as ``config``. With the name of a preset, it is the preset's ratio.
        speedup: the wanted speed-up, ≥ 1, instead of ``config``. It chooses the default method with the
            lowest ratio whose counted operations reach it, at the model's default size and the pipeline's
            default number of steps. For others, see :func:`tokenmerge.speedup.ratio_for`. Raising it makes
            the picture less like the dense one.
        start: share of the denoising steps before merging starts, 0 ≤ start < until. Earlier steps
            are dense: a rule is added that sets ``ratio=0`` and ``reuse.every=1`` for them, see
            :class:`tokenmerge.Rule`. Raising it saves less time and brings the picture a little closer to the
            dense one.
        until: share of the denoising steps after which merging ends, likewise. Lowering it saves less time
            and brings the picture much closer.
        max_cache: highest size of what the default method caches between steps, such as ``"200MB"``, or a
            number of bytes. The size is counted at the model's default size of the sample. If the limit is
            too low, corrections are left out first, then the skipping of a UNet's finest level, then step
            reuse, and at last the features of the step before; ``print(patch)`` says what was left out.
            Lowering it makes the picture less like the dense one, or saves less time. None: no limit.

    Returns:
        A handle: ``print(patch)`` says what it does in a few lines, ``print(patch.report())`` shows each
        block, and ``patch.remove()`` restores the model.

    Raises:
        UnsupportedModelError: the object neither is nor contains a supported model.
        NothingToMergeError: no token would merge with these settings. A ControlNet may stay dense if the
            denoiser merges; the report names it.
        ConfigError: ``config`` is not a configuration, or does not fit the model.
        ModelInUseError: another thread runs the model.
    """
    if isinstance(config, ViTConfig) and ratio is speedup is start is until is max_cache is None:
        return _merge_in_encoders(pipe_or_model, config)
    if isinstance(config, ViTConfig) and ratio is speedup is max_cache is None:
        raise ConfigError("start, until: a vision transformer has no denoising steps; leave them out")
    settings, found_for, method, hosts = _asked_settings(pipe_or_model, config, ratio, speedup)
    if start is not None or until is not None:
        dense = dense_outside(0.0 if start is None else start, 1.0 if until is None else until)
        settings = dataclasses.replace(settings, rules=(*settings.rules, *dense))
    if max_cache is not None:
        limit = bytes_of(max_cache)
        if not is_default(method):
            raise ConfigError(
                f"max_cache: only the default method takes a limit, got {shown(max_cache)} with other "
                "settings; leave out max_cache, or the other settings"
            )
        settings, left_out = within(pipe_or_model, settings, limit)
        method = f"{method} in {max_cache}" + (f" ({left_out})" if left_out else "")
    return merge_in_hosts(
        pipe_or_model,
        settings,
        found_for=found_for,
        method=method,
        hosts=hosts,
        check_size=found_for is None,  # settings of a file need not be for the default size
    )


def _asked_settings(
    model: object, config: object, ratio: float | None, speedup: float | None
) -> tuple[ToMeConfig, FoundFor | None, str, tuple[Host, ...] | None]:
    """The settings that the arguments of apply_token_merging ask for.

    Returns:
        The settings, what they were found for, their name, and the models if they were already looked up.
    """
    is_file = isinstance(config, os.PathLike) or (isinstance(config, str) and config.endswith(".json"))
    is_name = isinstance(config, str) and not is_file
    given = {"config": None if is_name else config, "ratio": ratio, "speedup": speedup}
    named = [f"{name}={shown(value)}" for name, value in given.items() if value is not None]
    if len(named) > 1 or (is_name and speedup is not None):
        raise ConfigError(f"config, ratio, speedup: expected one of them, got {', '.join(named)}")
    if is_file:
        saved = load_settings(Path(str(config)))
        return saved.config, saved.found_for, Path(str(config)).name, None
    if isinstance(config, ToMeConfig):
        return config, None, "", None
    if isinstance(config, str) and config != "auto":
        return _preset(config, ratio), None, config, None
    hosts = _hosts(model)  # raises an error that names ViTConfig for a vision transformer
    if speedup is not None:
        found = ratio_for(model, speedup)
        return choose_for(model, hosts, found), None, f"auto for a speed-up of {speedup:g}", hosts
    wanted: Any = config if ratio is None and not is_name else ratio
    wanted = _DEFAULT_RATIO if wanted is None else wanted
    is_number = isinstance(wanted, numbers.Real) and not isinstance(wanted, bool)
    if not is_number:
        raise ConfigError(
            "config: expected a ratio such as 0.5, a ToMeConfig such as ToMeConfig(ratio=0.5), a ViTConfig "
            "such as ViTConfig(r=8), the name of a preset such as 'toma', or a file of settings such as "
            f"'tuned.json', got {shown(wanted)}"
        )
    return choose_for(model, hosts, wanted), None, "auto", hosts


def _preset(name: str, ratio: float | None) -> ToMeConfig:
    """The settings of a published method."""
    if name not in presets.__all__:
        raise ConfigError(
            f"config: expected the name of a preset, one of {', '.join(presets.__all__)}, or auto, or the "
            f"path of a .json file of settings, got {shown(name)}"
        )
    make: Callable[..., ToMeConfig] = getattr(presets, name)
    return make() if ratio is None else make(ratio)


def merge_in_hosts(
    model: object,
    config: ToMeConfig,
    dense_if_too_small: bool = False,
    found_for: FoundFor | None = None,
    method: str = "",
    hosts: tuple[Host, ...] | None = None,
    check_size: bool = True,
) -> Patch[Report, RecordedPlan]:
    """Patch a diffusion model as :func:`apply_token_merging` does.

    Args:
        model: a diffusers pipeline or model, or a CompVis-style model.
        config: what to merge and how much.
        dense_if_too_small: a call whose sample has too few tokens to merge runs dense, with one warning for
            each size. Otherwise such a call raises NothingToMergeError.
        found_for: what the settings were found for; a model, size or number of steps that differs gives a
            warning. None: unknown.
        method: name of the settings, for the handle's text.
        hosts: the models in ``model``, if they are known. Finding them takes a third of the time of patching.
        check_size: whether settings are refused that merge nothing at the model's default size. A call whose
            sample is too small raises NothingToMergeError in any case.
    """
    hosts = hosts or _hosts(model)
    merging, _ = hosts_that_merge(hosts, config, size=None, check_size=check_size, method=method)
    refuse_in_use([host.root for host in hosts])
    pipeline = Pipeline(None if isinstance(model, nn.Module) else model)
    warned: set[str] | None = set() if dense_if_too_small else None
    denoiser = next((host for host in merging if not host.controlnet), merging[0])
    states = {
        host.root: new_state(host, config, pipeline, warned, found_for if host is denoiser else None, method)
        for host in merging
    }
    for root, state in states.items():
        state.kept = look(state, root, pipeline.given)
        state.keep_dense(state.threads.value.own_memory)
    for host in hosts:
        restore(host.root)
    for host in merging:
        patch_host(host, states[host.root])
    if found_for is not None and (differences := found_for.differences(model=type(denoiser.root).__name__)):
        warnings.warn(found_for.warning(differences), stacklevel=3)
    return DiffusionPatch(model, states, denoiser, method)


def _merge_in_encoders(model: object, config: ViTConfig) -> Patch[ViTReport, RecordedTokens]:
    encoders = checked_encoders(model, config)
    refuse_in_use(list(encoders))
    states = {root: new_vit_state(encoder, config) for root, encoder in encoders.items()}
    for root, state in states.items():
        restore(root)
        patch_encoder(root, state)
    return EncoderPatch(model, states)


def _hosts(model: object) -> tuple[Host, ...]:
    try:
        return find_hosts(model)
    except UnsupportedModelError as error:
        denoises = any(getattr(model, name, None) is not None for name in DENOISERS)
        if denoises or not (encoders := find_encoders(model)):
            raise
        name = type(next(iter(encoders))).__name__
        raise UnsupportedModelError(
            f"no diffusion model to merge tokens in: found the vision transformer {name}, which takes a "
            "ViTConfig such as ViTConfig(r=8) instead of a ToMeConfig"
        ) from error


def remove_token_merging(pipe_or_model: object) -> None:
    """Restore a model exactly as it was. A model that is not patched stays as it is.

    Raises:
        UnsupportedModelError: the object neither is nor contains a supported model.
        ModelInUseError: another thread runs the model.
    """
    patchable = _patchable(pipe_or_model)
    if not patchable:
        find_hosts(pipe_or_model)  # raises an error that names the supported models
    refuse_in_use([root for root, _ in patchable])
    for root, _ in patchable:
        restore(root)


@overload
def token_merging(
    pipe_or_model: object, config: ToMeConfig | float | str | os.PathLike[str] = 0.5
) -> contextlib.AbstractContextManager[Patch[Report, RecordedPlan]]: ...
@overload
def token_merging(
    pipe_or_model: object, config: ViTConfig
) -> contextlib.AbstractContextManager[Patch[ViTReport, RecordedTokens]]: ...
@contextlib.contextmanager
def token_merging(pipe_or_model: object, config: Any = 0.5) -> Iterator[Patch[Any, Any]]:
    """Merge tokens within the context, then restore the earlier state, also after an exception.

    Args:
        pipe_or_model: as for :func:`apply_token_merging`.
        config: what to merge and how much.

    Raises:
        UnsupportedModelError, NothingToMergeError, ConfigError, ModelInUseError: as for
            :func:`apply_token_merging`. A model that another thread is running when the context ends stays
            patched.
    """
    before = [(root, patch, state_of(root)) for root, patch in _patchable(pipe_or_model)]
    handle = apply_token_merging(pipe_or_model, config)
    try:
        yield handle
    finally:
        refuse_in_use([root for root, _, _ in before])
        for root, patch, state in before:
            restore(root)
            if state is not None:
                patch(state)


@contextlib.contextmanager
def revise_plans(model: nn.Module, revise: Callable[[Tensor, Plan], Plan]) -> Iterator[None]:
    """Within the context, let a function replace each new plan of a patched model.

    Args:
        model: the patched model; one that is not patched makes no plan.
        revise: is called with the features ``[b, n, c]`` and the new plan, and returns the plan to use.
    """
    state = state_of(model)
    with contextlib.nullcontext() if state is None else state.revising(revise):
        yield


def _patchable(model: object) -> list[tuple[nn.Module, Callable[[Any], None]]]:
    """Every part of a model that can be patched, with the function that patches it; may be empty."""
    found: list[tuple[nn.Module, Callable[[Any], None]]] = []
    with contextlib.suppress(UnsupportedModelError):
        found += [(host.root, partial(patch_host, host)) for host in find_hosts(model)]
    with contextlib.suppress(UnsupportedModelError):
        found += [(root, partial(patch_encoder, root)) for root in find_encoders(model)]
    return found
