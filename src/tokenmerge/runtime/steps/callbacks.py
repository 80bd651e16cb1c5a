"""Callbacks of pipelines: whether there is one, and whether it calls the model, as the call stack shows.

A pipeline runs its callback after a step. A call that the callback makes belongs to no step, whatever sample
and timestep it is given.
"""

from __future__ import annotations

import functools
import sys
from types import CellType, FrameType
from typing import Any

import torch

from tokenmerge.runtime.steps.pipeline import is_pipeline

_CALLBACKS = ("callback_on_step_end", "callback")  # arguments of pipelines


def has_callback(pipe: Any) -> bool:
    """Return whether a pipeline that runs in this thread has a callback, which may change its latents."""
    frame = None if pipe is None or torch.compiler.is_compiling() else sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__call__" and frame.f_locals.get("self") is pipe:
            return any(frame.f_locals.get(name) is not None for name in _CALLBACKS)
        frame = frame.f_back
    return False


def calls_back(running: Any) -> bool:
    """Return whether this thread runs a callback of the ``running`` pipeline, which is the innermost one.

    A callback may run a pipeline itself, with a scheduler of its own. Then it is that one that runs. It may
    also be a method of an object that holds the pipeline's scheduler, and is taken for the innermost
    pipeline.
    """
    if running is None or torch.compiler.is_compiling():
        return False
    frame: FrameType | None = sys._getframe(1)
    called = None
    while frame is not None:
        owner: Any = frame.f_locals.get("self") if frame.f_code.co_varnames[:1] == ("self",) else None
        if is_pipeline(owner):
            if owner.scheduler is not running.scheduler:
                return False
            variables = frame.f_locals
            callbacks = [variables[name] for name in _CALLBACKS if name in variables]
            if callbacks:
                return called is not None and any(_is_call_of(callback, called) for callback in callbacks)
        called = frame
        frame = frame.f_back
    return False


def _is_call_of(function: Any, frame: FrameType) -> bool:
    """Return whether a frame is that of a call of a function, a method or an object that can be called."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    if not hasattr(function, "__code__"):
        owner = function
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    variables = frame.f_locals
    if code is not frame.f_code:
        return False
    if owner is not None and variables.get(code.co_varnames[0]) is not owner:
        return False
    # Functions that were made in one place, as by a decorator, share their code.
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    return all(variables.get(name) is _content(cell) for name, cell in cells)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None
