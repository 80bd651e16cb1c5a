"""Caches of other packages beside settings that change from step to step: what they keep would not fit."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from tokenmerge.config import ToMeConfig
from tokenmerge.config.origin import RATIO, instead, named
from tokenmerge.config.rules import REUSE_EVERY
from tokenmerge.errors import UnsupportedModelError
from tokenmerge.runtime.patching.watched import PACKAGES, function_of

# How to take off the caches of packages whose wrappers call what they replace. With an empty string, they
# replace the forward of the model and nothing else.
_REMOVED_BY = {
    "DeepCache": "helper.disable()",
    "cache_dit": "cache_dit.disable_cache(pipe)",
    "para_attn": "",
    "teacache": "",
}
_DEPTH = 3  # of objects that hold one another, in which the forward of a model is looked for
# Settings that never change how many tokens a block gets.
_SAME_NUMBER = {"seed", "features", "combine", "threshold", "proportional", REUSE_EVERY}


def refuse_other_caches(
    root: nn.Module, config: ToMeConfig, method: str, merging: Collection[str] = ()
) -> None:
    """Refuse other caches in a model of which the steps differ, where these keep results from call to call.

    If some steps leave out parts, all such caches of diffusers are refused, and what
    :func:`refuse_other_forward` refuses. If some steps merge more tokens than others, those are refused that
    are inside a block or layer that merges. ``merging`` are the paths of such blocks and layers.
    """
    resizing = _resizing(config, method)
    for path, module in root.named_modules() if config.reuse.on or resizing else ():
        for hook in _hooks_of(module).values():
            if not hook._is_stateful:
                continue
            name = f"{path or type(root).__name__}: "
            kept = f"{type(hook).__name__} keeps results from call to call; remove that cache first: "
            kept += f"{_removal(root, hook)}, or "
            if config.reuse.on:
                raise UnsupportedModelError(
                    f"{name}{named(method, config.reuse.given)} leaves blocks out on some steps, and {kept}"
                    f"{instead(method, 'take reuse.every=1')}"
                )
            if any(path.startswith(f"{part}.") for part in merging):
                raise UnsupportedModelError(
                    f"{name}{named(method, resizing)} merges more tokens on some steps than on others, and "
                    f"{kept}{instead(method, f'leave {resizing} out')}"
                )
    refuse_other_forward(root, config, method)


def _resizing(config: ToMeConfig, method: str) -> str:
    """Return the settings by which some steps merge more tokens than others, or an empty string."""
    given = [f"correction.every={config.correction.every}"] if config.correction.on else []
    for place, rule in enumerate(config.rules):
        if rule.of_steps and rule.changes.keys() - _SAME_NUMBER:
            given.append(f"rules[{place}]={rule}")
    if given and method == RATIO:
        return f"ratio={config.ratio:g}"
    return " and ".join(given)


def _hooks_of(module: nn.Module) -> Mapping[str, Any]:
    """Return the hooks of diffusers on a module, by their names."""
    hooks: Mapping[str, Any] = getattr(module.__dict__.get("_diffusers_hook"), "hooks", {})
    return hooks


def _removal(root: nn.Module, hook: Any) -> str:
    """Return how to take off the cache of diffusers that a hook belongs to."""
    if getattr(root, "is_cache_enabled", False):
        return "model.disable_cache()"
    # A function of diffusers has put it on the model, which such functions cannot take off again.
    names: dict[str, None] = {}
    for module in root.modules():
        for name, other in _hooks_of(module).items():
            if type(other).__module__ == type(hook).__module__:
                names[name] = None
    registry = "diffusers.hooks.HookRegistry.check_if_exists_or_initialize(model)"
    return "; ".join(f"{registry}.remove_hook({name!r})" for name in names)


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
    again = _REMOVED_BY.get(_package_of(other), "")
    if not again and vars(root).get("forward") is other:
        again = "del model.forward"
    again = again or f"set {name}.forward to what it was"
    raise UnsupportedModelError(
        f"{name}: {named(method, config.reuse.given)} leaves blocks out on some steps, and "
        f"{function.__module__}.{function.__qualname__} takes the place of the model's forward, as a second "
        f"cache does; take it off first: {again}, or {instead(method, 'take reuse.every=1')}"
    )


def _other_forward(root: nn.Module) -> Any:
    """Return what runs instead of the forward of a model, or None if nothing does."""
    for forward in _forwards(root):
        package = _package_of(forward)
        if package in _REMOVED_BY or not (package in PACKAGES or _holds_forward(root, forward, _DEPTH)):
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


def _package_of(code: Any) -> str:
    """Return the name of the package in which a function was written, also if it took another's name."""
    function = function_of(code)
    function = getattr(function, "__func__", function)
    module = str(getattr(function, "__globals__", {}).get("__name__", function.__module__))
    return module.partition(".")[0]


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
