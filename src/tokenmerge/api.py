"""Functions that apply and remove token merging. The type of the config decides the kind of model."""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, overload

from torch import nn

from tokenmerge import presets
from tokenmerge.config import Rule, ToMeConfig, Tuned, dense_outside, load_settings
from tokenmerge.config.checks import as_number
from tokenmerge.config.origin import RATIO
from tokenmerge.default_method import DefaultMethod, check_min_psnr
from tokenmerge.errors import ConfigError, NothingToMergeError, UnsupportedModelError, nearest_of, short_repr
from tokenmerge.handle import Handle, Patch
from tokenmerge.models.base import Host
from tokenmerge.models.find import DENOISERS, find_hosts
from tokenmerge.models.undescribed import refusal
from tokenmerge.ratio_method import little_to_gain, settings_of_ratio
from tokenmerge.runtime.memory.state import warn_caller
from tokenmerge.runtime.patching.patch import (
    changing,
    hosts_that_merge,
    new_state,
    patch_host,
    refuse_in_use,
    restore,
    state_of,
    take_over,
)
from tokenmerge.runtime.patching.watched import look
from tokenmerge.runtime.steps.pipeline import Pipeline
from tokenmerge.tuned_method import TunedMethod
from tokenmerge.vit.config import ViTConfig
from tokenmerge.vit.handle import EncoderPatch
from tokenmerge.vit.hosts import find_encoders
from tokenmerge.vit.runtime import EncoderState, checked_encoders, patch_encoder

__all__ = ["Patch", "apply_token_merging", "remove_token_merging", "token_merging"]

_USUAL_SPEEDUP = 2.0  # of a call that asks for nothing
_ARGUMENTS = ("config", "speedup", "ratio", "start", "until", "min_psnr")
_TWO_WAYS = (
    "apply_token_merging(pipe, speedup=2.0) for the default method, or apply_token_merging(pipe, ratio=0.5) "
    "to merge half of the tokens and nothing else"
)


@dataclasses.dataclass(frozen=True)
class _Asked:
    """The settings that the arguments of apply_token_merging ask for, as arguments of merge_in_hosts."""

    config: ToMeConfig
    method: str = ""
    hosts: tuple[Host, ...] | None = None
    default: DefaultMethod | None = None
    check_size: bool = True


@overload
def apply_token_merging(
    pipe_or_model: object,
    config: ToMeConfig | str | os.PathLike[str] | None = None,
    *,
    speedup: float | None = None,
    ratio: float | None = None,
    start: float | None = None,
    until: float | None = None,
    min_psnr: float | None = None,
) -> Patch: ...
@overload
def apply_token_merging(pipe_or_model: object, config: ViTConfig) -> EncoderPatch: ...
def apply_token_merging(
    pipe_or_model: object,
    config: ToMeConfig | ViTConfig | str | os.PathLike[str] | None = None,
    *,
    speedup: float | None = None,
    ratio: float | None = None,
    start: float | None = None,
    until: float | None = None,
    min_psnr: float | None = None,
    **unknown: object,
) -> Handle[Any, Any]:
    """Patch a diffusion model or a vision transformer in place, so that it skips work and merges tokens.

    If an error is raised, the model stays as it was.

    Args:
        pipe_or_model: for a ToMeConfig, a diffusers pipeline (its ControlNets are patched too), a diffusers
            model such as ``pipe.unet``, or a CompVis-style model. For a ViTConfig, a ViT, DeiT, CLIP, SigLIP
            or DINOv2 model of transformers, a ``VisionTransformer`` of timm, or a pipeline that contains one.
            A model that is already patched gets the new settings.
        config: what to merge and how much. A string is the name of a preset of :mod:`tokenmerge.presets`,
            such as ``"toma"``, or the path of a ``.json`` file that :func:`tokenmerge.config.save_config` or
            ``tokenmerge tune`` wrote. That of tune holds a speed-up for the default method, and how far the
            estimates were off: they are corrected in generations of the model, size, number of steps,
            scheduler and guidance that it was measured on. In others there is a warning, and the estimates
            are not corrected. If it is None, the default method or ``ratio`` holds.
        speedup: of the default method, the wanted speed-up by operations, ≥ 1: dense operations divided by
            those of the generation (default: 2.0). When a generation begins, settings are chosen that
            reach it at the actual size, number of steps and guidance, see
            :mod:`tokenmerge.default_method`. Raising it makes the image less like the dense one. The
            speed-up by the clock is mostly lower, since other work takes time too. With a file of
            ``tokenmerge tune``, it takes the place of the speed-up in the file.
        ratio: fraction of tokens that merge, 0 ≤ ratio ≤ 0.75, without step reuse. In the pipeline of a
            transformer, tokens merge before its first block and are unmerged after its last one; the first
            step runs on all tokens, and later ones get back what merging loses. There it is the mean of the
            steps: it falls from 1.15 to 0.85 times that. In a UNet, and in a model alone, tokens merge around
            self-attention. Raising it saves more time and makes the image less
            like the dense one. With the name of a preset, it is the preset's ratio.
        start: share of the denoising steps before merging starts, 0 ≤ start < until. Earlier steps
            are dense: a rule is added that sets ``ratio=0`` and ``reuse.every=1`` for them, see
            :class:`tokenmerge.Rule`. Raising it saves less time and brings the image a little closer.
        until: share of the denoising steps after which merging ends, start < until ≤ 1. Later steps are dense
            by such a rule too. Lowering it saves less time and brings the image much closer.
        min_psnr: of the default method, the PSNR to the dense image of the same seed that an image shall
            have, in dB, 1 to 100. While a generation runs, it estimates its closeness, and skips fewer steps
            than ``speedup`` plans where it has to, up to none. In a batch the worst image decides, so an
            image can depend on the others. Each full step waits once for the device. Raising it brings
            the image closer and saves less time. The estimate can be wrong, see
            ``patch.estimate``. With a file of ``tokenmerge tune``, the fastest plan is taken that is expected
            to keep it by what was measured, and no step is added. With None, the speed-up alone decides.
        unknown: arguments of other names, which are refused.

    Returns:
        A handle: ``print(patch)`` says what it does in a few lines, ``print(patch.report())`` shows each
        block, and ``patch.remove()`` restores the model.

    Raises:
        UnsupportedModelError: the object neither is nor contains a supported model.
        NothingToMergeError: no token would merge with these settings. A ControlNet may stay dense if the
            denoiser merges; the report names it.
        ConfigError: ``config`` is not a configuration, or does not fit the model.
        ModelInUseError: another thread runs the model.
        TypeError: there is no argument of a name that was given.
    """
    for name, value in unknown.items():
        instead = nearest_of(name, _ARGUMENTS) or "; see help(apply_token_merging)"
        if name in ToMeConfig.__dataclass_fields__:
            instead = f"; pass a setting as ToMeConfig(ratio=0.5, {name}=…)"
        raise TypeError(
            f"{name}: apply_token_merging takes {', '.join(_ARGUMENTS)}, "
            f"got {name}={short_repr(value)}{instead}"
        )
    of_diffusion = (ratio, speedup, min_psnr)
    if isinstance(config, ViTConfig) and all(value is None for value in of_diffusion):
        if start is None and until is None:
            return _merge_in_encoders(pipe_or_model, config)
        raise ConfigError("start, until: a vision transformer has no denoising steps; leave them out")
    asked = _asked(pipe_or_model, config, speedup, ratio, min_psnr)
    if start is not None or until is not None:
        until = 1.0 if until is None else until
        change = partial(_with_rules, dense_outside(0.0 if start is None else start, until))
        default = asked.default and dataclasses.replace(asked.default, change=change)
        asked = dataclasses.replace(asked, config=change(asked.config), default=default)
    patch = merge_in_hosts(pipe_or_model, **vars(asked))
    if asked.method == RATIO and asked.hosts is not None:
        told = little_to_gain(pipe_or_model, asked.hosts, asked.config)
        if told:
            warn_caller(told)
    method = asked.default
    if method is not None and method.facts.follows_steps:
        # A run has steps and a size of its own, and warns by itself.
        told = method.missed(method.facts, under=", with the pipeline's defaults")
        if told:
            warn_caller(told)
    return patch


def _asked(
    model: object, config: object, speedup: float | None, ratio: float | None, min_psnr: float | None
) -> _Asked:
    """Return the settings that the arguments of apply_token_merging ask for."""
    is_file = isinstance(config, os.PathLike) or (isinstance(config, str) and config.endswith(".json"))
    is_name = isinstance(config, str) and not is_file
    saved = load_settings(Path(str(config))) if is_file and ratio is None else None
    if isinstance(saved, Tuned):
        check_min_psnr("min_psnr", min_psnr)
        return _of_tuned(model, saved, Path(str(config)).name, speedup, min_psnr)
    given: dict[str, object] = {}
    if config is not None and not (is_name and speedup is None):  # the name of a preset goes with a ratio
        given["config"] = config
    if speedup is not None:
        given["speedup"] = speedup
    if ratio is not None:
        given["ratio"] = ratio
    _check_given(given, min_psnr, alone=config is None and ratio is None)
    if saved is not None:
        return _Asked(saved, Path(str(config)).name)
    if isinstance(config, ToMeConfig):
        return _Asked(config)
    if isinstance(config, str):
        return _Asked(_preset(config, ratio), config)
    if config is not None:
        hosts_of(model)  # raises an error that names ViTConfig for a vision transformer
        raise _not_a_config(config)
    if ratio is not None:
        return _of_ratio(model, ratio)
    return _of_speedup(model, _USUAL_SPEEDUP if speedup is None else speedup, min_psnr)


def _check_given(given: dict[str, object], min_psnr: float | None, alone: bool) -> None:
    """Refuse arguments that ask for two things, and a tolerance unless the default method is ``alone``."""
    named = ", ".join(f"{name}={short_repr(value)}" for name, value in given.items())
    if len(given) > 1:
        raise ConfigError(f"{', '.join(given)}: expected one of them, got {named}; write {_TWO_WAYS}")
    check_min_psnr("min_psnr", min_psnr)
    if min_psnr is not None and not alone:
        raise ConfigError(
            f"min_psnr: only the default method can run more steps than it plans, got {min_psnr:g} with "
            f"{named}; write apply_token_merging(pipe, speedup=2.0, min_psnr={min_psnr:g})"
        )


def _not_a_config(config: object) -> ConfigError:
    """Return the error for a ``config`` that is none."""
    if isinstance(config, numbers.Real) and not isinstance(config, bool):
        return ConfigError(
            f"apply_token_merging: a number alone can mean a speed-up or a ratio, got "
            f"{short_repr(config)}; write {_TWO_WAYS}"
        )
    return ConfigError(
        "apply_token_merging: expected a ToMeConfig, a ViTConfig, the name of a preset such as 'toma', or a "
        f"file of settings such as 'tuned.json', got {short_repr(config)}; or write {_TWO_WAYS}"
    )


def _of_ratio(model: object, ratio: float) -> _Asked:
    """Return the settings that a ratio asks for: token merging alone."""
    hosts = hosts_of(model)
    if any(host.unmerged for host in hosts):
        raise UnsupportedModelError(next(refusal(host) for host in hosts if host.unmerged))
    share = as_number(ratio)
    if share is not None and share >= 1:
        raise ConfigError(
            f"ratio: expected the share of tokens that merge, from 0 to 0.75, got {short_repr(ratio)}; for "
            "half of them write ratio=0.5, and for a speed-up speedup=2.0"
        )
    return _Asked(settings_of_ratio(model, hosts, ratio), RATIO, hosts)


def _of_speedup(model: object, speedup: float, min_psnr: float | None) -> _Asked:
    """Return the settings that a speed-up asks for: the default method."""
    hosts = hosts_of(model)
    default = DefaultMethod.of(model, hosts, speedup, min_psnr)
    follows = default.facts.follows_steps and default.speedup > 1
    if not follows and default.speedup > 1 and any(host.unmerged for host in hosts):
        raise UnsupportedModelError(next(refusal(host) for host in hosts if host.unmerged))
    if not follows and default.speedup > 1 and not default.widest.merges:
        raise NothingToMergeError(
            "nothing to merge: a model alone has no steps to skip, and merging its tokens would save no time "
            "at its default size; pass the pipeline, or write apply_token_merging(model, ratio=0.5)"
        )
    return _Asked(default.widest, default.name, hosts=hosts, default=default if follows else None)


def _of_tuned(
    model: object, tuned: Tuned, name: str, speedup: float | None, min_psnr: float | None
) -> _Asked:
    """Return the settings for a file of ``tokenmerge tune``: the default method with its speed-up.

    A model alone has no steps, so nothing that was measured holds for it.
    """
    if getattr(model, "scheduler", None) is None:
        return _of_speedup(model, tuned.speedup if speedup is None else speedup, min_psnr)
    hosts = hosts_of(model)
    method = TunedMethod.of_tuned(model, hosts, tuned, speedup, min_psnr)
    return _Asked(method.widest, f"{method.name} ({name})", hosts, method if method.speedup > 1 else None)


def _with_rules(rules: tuple[Rule, ...], config: ToMeConfig) -> ToMeConfig:
    return dataclasses.replace(config, rules=(*config.rules, *rules))


def _preset(name: str, ratio: float | None) -> ToMeConfig:
    """Return the settings of a published method."""
    if name not in presets.__all__:
        instead = nearest_of(name, presets.__all__) or f"; or write {_TWO_WAYS}"
        raise ConfigError(
            f"apply_token_merging: expected the name of a preset, one of {', '.join(presets.__all__)}, or a "
            f".json file of settings, got {short_repr(name)}{instead}"
        )
    make: Callable[..., ToMeConfig] = getattr(presets, name)
    return make() if ratio is None else make(ratio)


def merge_in_hosts(
    model: object,
    config: ToMeConfig,
    dense_if_too_small: bool = False,
    method: str = "",
    hosts: tuple[Host, ...] | None = None,
    check_size: bool = True,
    default: DefaultMethod | None = None,
) -> Patch:
    """Patch a diffusion model as :func:`apply_token_merging` does.

    A call whose sample has too few tokens to merge runs dense with ``dense_if_too_small``, with one warning
    for each size; otherwise it raises NothingToMergeError. The handle names the settings ``method``. Finding
    the ``hosts`` takes a third of the time of patching, if they are not given. With ``check_size``, settings
    are refused that merge nothing at the model's default size. The ``default`` method chooses the settings of
    each generation; without it, ``config`` has them.
    """
    hosts = hosts or hosts_of(model)
    merging, _ = hosts_that_merge(hosts, config, size=None, check_size=check_size, method=method)
    refuse_in_use(host.root for host in hosts)
    pipeline = Pipeline(None if isinstance(model, nn.Module) else model)
    facts = {"dense_if_too_small": dense_if_too_small, "told": set(), "method": method, "default": default}
    denoiser = next((host for host in merging if not host.controlnet), merging[0])
    first = config if default is None else default.settings(default.facts)
    states = {}
    for host in merging:
        state = new_state(host, config, pipeline, **facts)
        states[host.root] = state
        state.leave_alone(look(state, host.root, pipeline.given(), first), state.threads.value.own_memory)
    with changing(host.root for host in hosts):
        for host in hosts:
            if host.root in states:
                take_over(state_of(host.root), states[host.root])
            restore(host.root)
        for host in merging:
            patch_host(host, states[host.root])
    return Patch(model, states, denoiser)


def _merge_in_encoders(model: object, config: ViTConfig) -> EncoderPatch:
    encoders = checked_encoders(model, config)
    refuse_in_use(encoders)
    states = {root: EncoderState(config, encoder) for root, encoder in encoders.items()}
    with changing(encoders):
        for root, state in states.items():
            take_over(state_of(root), state)
            restore(root)
            patch_encoder(root, state)
    return EncoderPatch(model, states, next(iter(states.values())))


def hosts_of(model: object) -> tuple[Host, ...]:
    """Return the models in an object, with an error that names ViTConfig for a vision transformer."""
    try:
        return find_hosts(model)
    except UnsupportedModelError as error:
        if any(getattr(model, name, None) is not None for name in DENOISERS):
            raise
        encoders = find_encoders(model)
        if not encoders:
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
    with changing(root for root, _ in patchable):
        for root, _ in patchable:
            restore(root)


@overload
def token_merging(
    pipe_or_model: object,
    config: ToMeConfig | str | os.PathLike[str] | None = None,
    *,
    speedup: float | None = None,
    ratio: float | None = None,
    start: float | None = None,
    until: float | None = None,
    min_psnr: float | None = None,
) -> contextlib.AbstractContextManager[Patch]: ...
@overload
def token_merging(
    pipe_or_model: object, config: ViTConfig
) -> contextlib.AbstractContextManager[EncoderPatch]: ...
@contextlib.contextmanager
def token_merging(pipe_or_model: object, config: Any = None, **arguments: Any) -> Iterator[Any]:
    """Merge tokens within the context, then restore the earlier state, also after an exception.

    The arguments and errors are those of :func:`apply_token_merging`. If another thread is running a model
    when the context ends, there is a ModelInUseError, and the model stays patched.
    """
    before = [(root, patch, state_of(root)) for root, patch in _patchable(pipe_or_model)]
    handle = apply_token_merging(pipe_or_model, config, **arguments)
    try:
        yield handle
    finally:
        with changing(root for root, _, _ in before):
            for root, patch, state in before:
                if state is not None:
                    take_over(state_of(root), state)
                restore(root)
                if state is not None:
                    patch(state)


def _patchable(model: object) -> list[tuple[nn.Module, Callable[[Any], None]]]:
    """Return the parts of a model that can be patched, each with the function that patches it."""
    found: list[tuple[nn.Module, Callable[[Any], None]]] = []
    with contextlib.suppress(UnsupportedModelError):
        found += [(host.root, partial(patch_host, host)) for host in find_hosts(model)]
    with contextlib.suppress(UnsupportedModelError):
        found += [(root, partial(patch_encoder, root)) for root in find_encoders(model)]
    return found
