"""Facts about host models: where their blocks are, where the token grid comes from, how they are called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models import compvis, flux, sd3, unet, wan
from tokenmerge.models.base import Block, Host, Layer, is_a

__all__ = ["Block", "Host", "Layer", "find_hosts", "parts"]

FAMILIES = (unet, compvis, sd3, flux, wan)


def find_hosts(model: object) -> tuple[Host, ...]:
    """Every denoiser and ControlNet that a pipeline or a model is made of.

    Args:
        model: a diffusers pipeline, a diffusers model, or a CompVis-style model; also compiled or wrapped
            for data-parallel training.

    Raises:
        UnsupportedModelError: nothing in it is a model that tokens can be merged in.
    """
    modules = list(parts(model))
    hosts: dict[int, Host] = {}
    for part in modules:
        for family in FAMILIES:
            if id(part) not in hosts and family.matches(part):
                hosts[id(part)] = family.describe(part)
    if not hosts:
        seen = ", ".join(sorted({type(part).__name__ for part in modules} or {type(model).__name__}))
        supported = ", ".join(name for family in FAMILIES for name in family.CLASSES)
        raise UnsupportedModelError(
            f"no model to merge tokens in: found {seen}; pass a diffusers pipeline or a model of one of the "
            f"classes {supported}, or an object with model.diffusion_model"
        )
    return tuple(hosts.values())


def parts(model: Any) -> Iterator[nn.Module]:
    """The modules of a pipeline, unwrapped; a module itself is its only part."""
    if not isinstance(model, nn.Module):
        # The attributes, not ``components``: that raises when one is missing or was added later.
        for value in vars(model).values() if hasattr(model, "__dict__") else ():
            for member in value if isinstance(value, list | tuple) else [value]:
                if isinstance(member, nn.Module):
                    yield from parts(member)
        return
    while (wrapped := _wrapped(model)) is not None:
        model = wrapped
    if is_a(model, "MultiControlNetModel", "MultiControlNetUnionModel"):
        for net in model.nets:
            yield from parts(net)
    elif isinstance(getattr(getattr(model, "model", None), "diffusion_model", None), nn.Module):
        yield model.model.diffusion_model
        if isinstance(control := getattr(model, "control_model", None), nn.Module):
            yield control
    else:
        yield model


def _wrapped(model: Any) -> Any:
    """The model inside a wrapper, None if it is not one."""
    if is_a(model, "OptimizedModule"):
        return model._orig_mod
    if is_a(model, "DistributedDataParallel", "DataParallel"):
        return model.module
    if is_a(model, "PeftModel"):
        return model.get_base_model()
    return None
