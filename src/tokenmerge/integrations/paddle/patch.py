"""The only file that changes layers of Paddle, and restores them.

The class of a block or of its sub-layer is swapped for a subclass of the same name. Its ``forward`` looks up
and calls that of the original class at each call. Parameters keep their names; hooks, adapters and attention
processors stay where they are. Models keep their classes and get a hook.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from paddle import nn

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.integrations.paddle.models import PaddleModel
from tokenmerge.integrations.paddle.runtime import (
    STATE,
    Run,
    State,
    block_call,
    layer_call,
    merged_layers,
    note_call,
)


def patch(run: Run) -> None:
    """Patch a model that :func:`check_swappable` accepts and that is not patched."""
    for block in run.blocks:
        _swap(block.layer, block_call, State(run, block))
        for name in merged_layers(block, run.settings[block.level]):
            _swap(getattr(block.layer, name), layer_call, State(run, block, name))
    run.host.root.__dict__[STATE] = State(run)
    run.host.root.register_forward_pre_hook(note_call, with_kwargs=True)


def restore(root: nn.Layer) -> None:
    """Restore every layer of a model. A model that is not patched stays as it is."""
    for layer in root.sublayers(include_self=True):
        if layer.__dict__.pop(STATE, None) is not None:
            layer.__class__ = getattr(type(layer), "_tokenmerge_base", type(layer))
            # Find the hook by its function, because the handle of a hook does not work on a copied layer.
            for key, hook in list(layer._forward_pre_hooks.items()):
                if hook is note_call:
                    del layer._forward_pre_hooks[key]
                    layer._forward_pre_hooks_with_kwargs_flag.pop(key, None)


def run_of(root: nn.Layer) -> Run | None:
    """Return the state that the layers of a patched model share; None for a model that is not patched."""
    state: State | None = root.__dict__.get(STATE)
    return None if state is None else state.run


def check_swappable(host: PaddleModel) -> None:
    """Refuse a model that other software has changed in a way that is not compatible with merging.

    Raises:
        UnsupportedModelError: ppdiffusers' own ``apply_tome`` is on, or a layer has a ``forward`` of its own.
    """
    for block in host.blocks:
        if hasattr(type(block.layer), "_parent"):
            raise UnsupportedModelError(
                f"{block.path}: ppdiffusers' own apply_tome is on; call ppdiffusers' remove_tome() first, "
                "before tokenmerge.paddle.pipeline_methods is imported, which replaces it"
            )
        for name in ("", *block.sub_layers):
            layer = getattr(block.layer, name) if name else block.layer
            if "forward" in layer.__dict__:
                raise UnsupportedModelError(
                    f"{block.path}{name and '.' + name}: other software has replaced its method 'forward' on "
                    "the layer itself, so that merging would have no effect; remove that first, apply token "
                    "merging, then put it back"
                )


@functools.cache
def _swapped_class(base: Any, call: Callable) -> Any:
    """Return the only subclass of ``base`` whose ``forward`` runs ``call`` around that of ``base``."""

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        original = functools.partial(base.forward, self)
        # Other code may keep a reference to this method, and call it after the layer was restored.
        return call(self, original, args, kwargs) if STATE in self.__dict__ else original(*args, **kwargs)

    return type(
        base.__name__,
        (base,),
        {
            "forward": forward,
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "__reduce_ex__": lambda self, protocol: (_rebuild, (base, call), self.__getstate__()),
            "_tokenmerge_base": base,
        },
    )


def _rebuild(base: type, call: Callable) -> nn.Layer:
    """Make an empty layer of a swapped class, for pickle and deepcopy: the class has no import path."""
    cls = _swapped_class(base, call)
    return cls.__new__(cls)


def _swap(layer: nn.Layer, call: Callable, state: State) -> None:
    layer.__dict__[STATE] = state
    base: Any = type(layer)
    layer.__class__ = _swapped_class(base, call)
