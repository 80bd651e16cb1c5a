"""The only file that changes the class of a module, and puts back what was there.

A module is changed by swapping its class for a subclass of the same name. One method of the subclass merges
the input, calls the method of the original class and unmerges the result. No code of the host is copied, its
parameters keep their names, and hooks, adapters and attention processors stay where they are.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.call import HostMethod, host_method
from tokenmerge.runtime.blocks.forward import COMPILED, block_call, compiled_block
from tokenmerge.runtime.blocks.span import compiled_span, span_call
from tokenmerge.runtime.memory.state import STATE

# Attributes of a module in which accelerate and diffusers keep its ``forward``, or what keeps it.
_HOLDERS = ("forward", "_old_forward", "_diffusers_hook")

# Makes the method of a swapped class from that of the original class.
MakeMethod = Callable[[HostMethod], Callable[..., Any]]


class Derived:
    """Counts the classes that other software has derived from swapped ones, as tomesd does."""

    number = 0


@functools.cache
def _swapped_class(base: type, method: str, call: MakeMethod) -> Any:
    """Return the subclass of ``base`` whose ``method`` is ``call`` of what ``base`` has.

    There is one for each combination, so that all modules of a class share their compiled code.
    """

    def note_derived(cls: type, **arguments: Any) -> None:
        super(swapped, cls).__init_subclass__(**arguments)
        Derived.number += 1

    attributes = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__init_subclass__": note_derived,
        "__reduce_ex__": lambda self, protocol: (_rebuild, (base, method, call), self.__getstate__()),
        "_tokenmerge_base": base,
        "_tokenmerge_method": method,
    }
    swapped: Any = type(base.__name__, (base,), attributes)
    original = host_method(base, swapped, method)
    function: Any = functools.wraps(getattr(base, method))(call(original))
    # A code object of its own: torch.compile counts the graphs of each, and limits them.
    function.__code__ = function.__code__.replace()
    setattr(swapped, method, function)
    if call is block_call:
        setattr(swapped, COMPILED, compiled_block(original.names))
    if call is span_call:
        setattr(swapped, COMPILED, compiled_span())
    # Tell diffusers' block caches, which look blocks up by exact class, what they know of the original.
    hooks = sys.modules.get("diffusers.hooks._helpers")
    if hooks is not None:
        with contextlib.suppress(ValueError):  # blocks of this class cannot be cached
            known = hooks.TransformerBlockRegistry.get(base)
            hooks.TransformerBlockRegistry.register(swapped, copy.copy(known))
    return swapped


def _rebuild(base: type, method: str, call: MakeMethod) -> nn.Module:
    """Make an empty module of a swapped class, for pickle and deepcopy: the class has no import path."""
    cls = _swapped_class(base, method, call)
    return cls.__new__(cls)


def swap(module: nn.Module, method: str, call: MakeMethod, state: object) -> None:
    """Replace ``method`` of a module by ``call`` of it, which finds ``state`` on the module, until undone."""
    base: Any = type(module)
    module.__class__ = _swapped_class(base, method, call)
    module.__dict__[STATE] = state
    _rebind_hooks(module, getattr(base, method))


def add_hook(module: nn.Module, hook: Callable, state: object) -> None:
    """Run ``hook``, of this package, before a module; it finds ``state`` on the module, until undone."""
    module.__dict__[STATE] = state
    module.register_forward_pre_hook(hook, with_kwargs=True)


def undo(module: nn.Module) -> None:
    """Undo all that :func:`swap` and :func:`add_hook` did to a module."""
    made: Any = type(module)
    swapped: Any = next((cls for cls in made.__mro__ if "_tokenmerge_base" in vars(cls)), None)
    if swapped is not None:
        module.__class__ = _without(made, swapped)
        _rebind_hooks(module, vars(swapped)[swapped._tokenmerge_method])
    # By the function itself: on a copied module the handle that torch hands out would not be the copy's.
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if getattr(hook, "__module__", "").startswith("tokenmerge."):
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)
    del module.__dict__[STATE]


@functools.lru_cache
def _without(cls: Any, swapped: Any) -> Any:
    """Return the class that other software, such as FSDP2, would have made instead of ``swapped``.

    ``cls`` is the class that it made, or a base of that. All modules of one class get one class again.
    """
    if cls is swapped:
        return swapped._tokenmerge_base
    if not issubclass(cls, swapped):
        return cls
    bases = tuple(_without(base, swapped) for base in cls.__bases__)
    attributes = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls)(cls.__name__, bases, attributes)


def _rebind_hooks(module: nn.Module, before: FunctionType) -> None:
    """Where hooks keep the original ``forward`` of a module, put that of its present class."""
    for holder, name in _hooked_forwards(module, before):
        vars(holder)[name] = MethodType(type(module).forward, module)


def _hooked_forwards(module: nn.Module, function: FunctionType) -> list[tuple[Any, str]]:
    """Return the places (object, attribute) that hold ``function`` bound to the module.

    Such are the innermost ends of the hook chains of accelerate and of diffusers, and the ``forward`` that
    the latter leaves on a module when its hooks are removed.
    """
    if module.__dict__.keys().isdisjoint(_HOLDERS):  # as in most models, and quick to see
        return []
    places = [(module, "forward"), (module, "_old_forward")]
    for reference in getattr(module.__dict__.get("_diffusers_hook"), "_fn_refs", ()):
        places += [(reference, "forward"), (reference, "original_forward")]
    bound = MethodType(function, module)
    return [(holder, name) for holder, name in places if vars(holder).get(name) == bound]


def check_swappable(module: nn.Module, path: str, method: str) -> None:
    """Refuse a module whose own attribute would hide the method of its class."""
    if method in module.__dict__ and not _hooked_forwards(module, getattr(type(module), method)):
        raise UnsupportedModelError(
            f"{path}: other software has replaced its method {method!r} on the module itself, so that "
            "merging would have no effect; remove that first, apply token merging, then put it back"
        )
