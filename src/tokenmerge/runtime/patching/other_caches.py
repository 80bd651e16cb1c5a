"""Caches of other packages beside step reuse: each would take the other's steps for its own."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from tokenmerge.config import ToMeConfig
from tokenmerge.config.origin import instead, named
from tokenmerge.errors import UnsupportedModelError
from tokenmerge.runtime.patching.watched import PACKAGES, function_of

_CACHES = (
    "DeepCache",
    "cache_dit",
    "para_attn",
    "teacache",
)  # packages whose wrappers call what they replace
_DEPTH = 3  # of objects that hold one another, in which the forward of a model is looked for


def refuse_other_caches(root: nn.Module, config: ToMeConfig, method: str) -> None:
    """Refuse other caches in a model of which some steps leave out parts.

    Such are those of diffusers, which keep results from call to call, and what :func:`refuse_other_forward`
    refuses.
    """
    for path, module in root.named_modules() if config.reuse.on else ():
        for hook in getattr(module.__dict__.get("_diffusers_hook"), "hooks", {}).values():
            if hook._is_stateful:
                raise UnsupportedModelError(
                    f"{path}: {named(method, config.reuse.given)} leaves blocks out on some steps, and "
                    f"{type(hook).__name__} keeps results from call to call; remove that cache first: "
                    f"model.disable_cache(), or {instead(method, 'take reuse.every=1')}"
                )
    refuse_other_forward(root, config, method)


def refuse_other_forward(root: nn.Module, config: ToMeConfig, method: str) -> None:
    """Refuse a function in place of the forward of a model of which some steps leave out parts.

    So TeaCache does, with a forward of its own. A function that calls the model's forward is let through, but
    not those of packages that cache.
    """
    other = _other_forward(root) if config.reuse.on else None
    if other is None:
        return
    name = type(root).__name__
    function = function_of(other)
    again = f"set {name}.forward to what it was"
    if vars(root).get("forward") is other:
        again = "del model.forward"
    raise UnsupportedModelError(
        f"{name}: {named(method, config.reuse.given)} leaves blocks out on some steps, and "
        f"{function.__module__}.{function.__qualname__} takes the place of the model's forward, as a second "
        f"cache does; take it off first: {again}, or {instead(method, 'take reuse.every=1')}"
    )


def _other_forward(root: nn.Module) -> Any:
    """Return what runs instead of the forward of a model, or None if nothing does."""
    for forward in _forwards(root):
        package = _module_of(forward).partition(".")[0]
        if package in _CACHES or not (package in PACKAGES or _holds_forward(root, forward, _DEPTH)):
            return forward
    return None


def _forwards(root: nn.Module) -> Iterator[Any]:
    """Yield the functions that run as the forward of a model, also those that hooks call."""
    attributes = vars(root)
    holders = [attributes, *map(vars, getattr(attributes.get("_diffusers_hook"), "_fn_refs", ()))]
    for holder in holders:
        for name in ("forward", "_old_forward", "original_forward"):
            forward = holder.get(name)
            if callable(forward):
                yield forward
    yield type(root).forward


def _module_of(code: Any) -> str:
    """Return the name of the module in which a function was written, also if it took another's name."""
    function = function_of(code)
    function = getattr(function, "__func__", function)
    return str(getattr(function, "__globals__", {}).get("__name__", function.__module__))


def _is_of_class(root: nn.Module, code: Any) -> bool:
    """Return whether a function is the forward that a class of the model was written with."""
    function = getattr(code, "__func__", code)
    return isinstance(function, FunctionType) and any(
        (function.__module__, function.__qualname__) == (cls.__module__, f"{cls.__qualname__}.forward")
        for cls in type(root).__mro__
    )


def _holds_forward(root: nn.Module, code: Any, depth: int) -> bool:
    """Return whether a function can call the forward of the model's class: it holds it, or names it."""
    if _is_of_class(root, code):
        return True
    return depth > 0 and any(_holds_forward(root, held, depth - 1) for held in _held_by(root, code))


def _held_by(root: nn.Module, code: Any) -> list[Any]:
    """Return what a function or another object holds, by which it could call the forward of a model."""
    if isinstance(code, MethodType):
        return [code.__func__] if code.__self__ is root else [code.__func__, code.__self__]
    if isinstance(code, functools.partial):
        return [code.func, *code.args, *code.keywords.values()]
    if isinstance(code, FunctionType):
        cells = [_content(cell) for cell in code.__closure__ or ()]
        names = code.__code__.co_names
        named = []
        for holder in (code.__globals__, vars(root)):
            named += [holder[name] for name in names if name in holder]
        if "forward" in names:  # of the class, as in Model.forward(self, …), which a method on a model hides
            named.append(type(root).forward)
        return [*cells, *(code.__defaults__ or ()), *(code.__kwdefaults__ or {}).values(), *named]
    if isinstance(code, dict):
        return list(code.values())
    known = isinstance(code, nn.Module | type) or not hasattr(code, "__dict__")
    return [] if known else list(vars(code).values())


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None
