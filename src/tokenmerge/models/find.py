"""Finds the facts of every model in a pipeline, a model, or a wrapper around one."""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch import nn

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models import families, undescribed
from tokenmerge.models.base import Host, is_a, is_called

FAMILIES = tuple(
    importlib.import_module(f"{families.__name__}.{module.name}")
    for module in pkgutil.iter_modules(families.__path__)
)

# Attributes of diffusers' pipelines that hold the denoiser.
DENOISERS = ("unet", "transformer")
_MOST_NAMES = 4  # in a message
_LONGEST_NAME = 60  # characters in a message


def knows(family: ModuleType, module: object) -> bool:
    """Return whether a family's file describes a model, by the names of its class and of its parts."""
    needed = getattr(family, "PARTS", ())
    return is_a(module, *family.CLASSES) and all(hasattr(module, name) for name in needed)


def find_hosts(model: object) -> tuple[Host, ...]:
    """Find every denoiser and ControlNet of a diffusers pipeline or model, or a CompVis-style model.

    It may be compiled, or wrapped for data-parallel training.

    Raises:
        UnsupportedModelError: it has no supported model.
    """
    modules = list(parts(model))
    hosts: dict[int, Host] = {}
    caller = _other_caller(model, modules)
    for part in modules:
        if id(part) not in hosts:
            hosts.update((id(part), host) for host in _hosts_in(part, caller))
    if not hosts:
        hosts = {id(host.root): host for host in _of_unknown_class(model)}
    if not hosts:
        why = next(filter(None, map(undescribed.why_dense, modules)), "")
        raise UnsupportedModelError(why or _no_host(model, modules))
    found = tuple(hosts.values())
    described = tuple(host for host in found if not host.unmerged)
    # A prior, or another model in which nothing merges, stays dense beside a denoiser that merges.
    return described if any(not host.controlnet for host in described) else found


def _hosts_in(part: nn.Module, caller: object) -> Iterator[Host]:
    """Yield the description of a denoiser or ControlNet, unless it runs dense; of other modules none."""
    if undescribed.reason_of(part):
        skipping = undescribed.skipping_of(part)
        if skipping is None or not skipping.dense:
            yield undescribed.describe(part)
        return
    family = next((family for family in FAMILIES if knows(family, part)), None)
    if family is None:
        return
    yield family.describe(part) if caller is None else undescribed.as_whole(part, caller)


def _other_caller(model: object, modules: list[nn.Module]) -> object:
    """Return the pipeline or ControlNet that calls a described model in a way that its blocks cannot follow.

    It is None if there is no such pipeline or ControlNet.
    """
    callers = [model, *(part for part in modules if is_called(part, "ControlNet"))]
    return next((caller for caller in callers if undescribed.reason_of(caller)), None)


def _of_unknown_class(pipe: object) -> Iterator[Host]:
    """Yield the denoisers of diffusers in a pipeline that nobody has looked at."""
    for name in DENOISERS if hasattr(pipe, "scheduler") else ():
        denoiser = getattr(pipe, name, None)
        for part in parts(denoiser) if isinstance(denoiser, nn.Module) else ():
            if undescribed.is_of_diffusers(part) and not undescribed.reason_of(part):
                yield undescribed.describe(part)


def _no_host(model: object, modules: list[nn.Module]) -> str:
    """Say why nothing can merge in ``model``, and what to pass instead."""
    if isinstance(model, str | os.PathLike):
        name = str(model)[-_LONGEST_NAME:]
        return (
            f"found the name {name!r} and no model; load it first with "
            f"diffusers.DiffusionPipeline.from_pretrained({name!r}), and pass the pipeline"
        )
    empty = [name for name in DENOISERS if getattr(model, name, modules) is None]
    if empty and not any(isinstance(getattr(model, name, None), nn.Module) for name in DENOISERS):
        which = " and ".join(empty)
        return (
            f"found {type(model).__name__}, whose {which} is None; load it with the pipeline, or pass the "
            f"{empty[0]} itself"
        )
    names = sorted({type(part).__name__ for part in modules} or {type(model).__name__})
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    if modules and hasattr(model, "scheduler"):
        return (
            f"found {', '.join(names[:_MOST_NAMES])}{more} in {type(model).__name__}, and none of them is a "
            "denoiser that docs/supported-models.md lists; pass a pipeline with one of these"
        )
    return (
        f"found {', '.join(names[:_MOST_NAMES])}{more}; pass a diffusers pipeline, its unet or transformer, "
        "or an object with model.diffusion_model; docs/supported-models.md lists the classes"
    )


def parts(model: Any) -> Iterator[nn.Module]:
    """Yield the modules of a pipeline, unwrapped, or a module itself, which is its only part.

    An object with ``model.diffusion_model``, module or not, is a CompVis-style model or a patcher of one.
    """
    while isinstance(model, nn.Module):
        wrapped = _wrapped(model)
        if wrapped is None:
            break
        model = wrapped
    denoiser = getattr(getattr(model, "model", None), "diffusion_model", None)
    if isinstance(denoiser, nn.Module):
        yield _within(denoiser)
        control = getattr(model, "control_model", None)
        if isinstance(control, nn.Module):
            yield control
    elif not isinstance(model, nn.Module):
        # The attributes, not ``components``: that raises when one is missing or was added later. They are
        # copied, since another thread that runs the pipeline sets attributes.
        attributes = vars(model).copy() if hasattr(model, "__dict__") else {}
        for value in attributes.values():
            for member in value if isinstance(value, list | tuple) else [value]:
                if isinstance(member, nn.Module):
                    yield from parts(member)
    elif is_called(model, "MultiControlNet"):  # it runs several others
        nets: Any = model.nets
        for net in nets:
            yield from parts(net)
    else:
        yield model


def _within(denoiser: nn.Module) -> nn.Module:
    """Return the first module in a denoiser that some family knows, since wrappers hold it, or itself."""
    for module in denoiser.modules():
        _wrapped(module)  # raises for wrappers in which tokens cannot be merged
        if any(knows(family, module) for family in FAMILIES):
            return module
    return denoiser


def _wrapped(model: Any) -> Any:
    """Return the model inside a wrapper, or None if ``model`` is no wrapper."""
    if is_a(model, "OptimizedModule"):
        return model._orig_mod
    if is_a(model, "DataParallel"):
        raise UnsupportedModelError(
            "tokens cannot be merged under DataParallel: its threads would share the state of a call; take "
            "DistributedDataParallel, or pass the model inside it (.module) and call that model"
        )
    if is_a(model, "DistributedDataParallel"):
        return model.module
    return model.get_base_model() if is_a(model, "PeftModel") else None
