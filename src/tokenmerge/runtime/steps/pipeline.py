"""Reads the denoising step and the batching of guidance from a diffusers pipeline, in each thread."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from tokenmerge.models.base import is_a
from tokenmerge.ops.once import once
from tokenmerge.runtime.steps.scheduler import DenoisingStep, Generation, is_midway, row_of_frames, step_of

Value = TypeVar("Value")

_STEPS = 20  # where a pipeline has no default
# Their batches hold the image guided by text and image, by the image alone, and by nothing.
_GUIDED_TWICE = ("StableDiffusionInstructPix2PixPipeline", "StableDiffusionXLInstructPix2PixPipeline")
# They put the guided prompt first in the batch.
_GUIDED_FIRST = ("LuminaPipeline", "LuminaText2ImgPipeline", *_GUIDED_TWICE)
_DENY_GUIDANCE = ("StableDiffusionPanoramaPipeline",)  # they guide, and always say that they do not


class PerThread(threading.local, Generic[Value]):
    """Holds one value for each thread, made when the thread first asks for it; copies begin with new ones.

    The value itself is an ordinary object whose attributes change. ``torch.compile`` follows such changes,
    and it would lose assignments to attributes of a ``threading.local``.
    """

    def __init__(self, make: Callable[[], Value]) -> None:
        # Python calls this in every thread that uses the object, with the arguments of the first call.
        self._make = make
        self.value = make()

    def __reduce__(self) -> tuple[Any, ...]:
        return PerThread, (self._make,)


class Latest(Generic[Value]):
    """What belongs to the latest run: that of the thread that asks, or of any if this one has run none."""

    def __init__(self, value: Value) -> None:
        self._own: PerThread[list[Value]] = PerThread(list)  # it is empty before the thread's first run
        self._of_any = value

    @property
    def value(self) -> Value:
        """The value of this thread's latest run."""
        latest = self._own.value
        return latest[0] if latest else self._of_any

    def set(self, value: Value, begins: bool = True) -> None:
        """Set the value of the run in this thread; ``begins``: it is the latest of all threads, too."""
        self._own.value[:] = [value]
        if begins:
            self._of_any = value


class WeakDictionary(WeakIdKeyDictionary):
    """A dictionary of objects that others own, compared by identity. Deep copies and pickles are empty."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return type(self)()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class Pipeline:
    """The pipeline that token merging was applied to, or none.

    Pipelines in several threads, or within each other, may share a model. The call stack shows which runs.
    """

    def __init__(self, pipe: object = None) -> None:
        self.states: list[Any] = []  # of its models, which take part in the same generations
        self.given: Callable[[], Any] = lambda: None  # returns the pipeline, or None if it is gone
        self.given_step: PerThread[DenoisingStep | None] = PerThread(lambda: None)
        self._is_given = pipe is not None
        # The thread that patched its models, and the timesteps that its schedulers had then.
        self._patched_in: int | None = None
        self._timesteps_then: list[weakref.ref[Any]] = []
        with contextlib.suppress(TypeError):  # of None, and of a plain namespace with models in it
            self.given = weakref.ref(pipe)

    def note_patched(self) -> None:
        """Note that this thread patches the models of the pipeline now."""
        self._patched_in = threading.get_ident()
        self._timesteps_then = []
        # A copy, since another thread that runs the pipeline sets attributes.
        attributes = getattr(self.given(), "__dict__", {}).copy()
        for name, value in attributes.items():
            timesteps = getattr(value, "timesteps", None)
            if name.endswith("scheduler") and isinstance(timesteps, Tensor):
                self._timesteps_then.append(weakref.ref(timesteps))

    def began_before(self, scheduler: Any, timestep: Tensor | float) -> bool:
        """Return whether a generation began before another thread patched the model that is called."""
        timesteps = getattr(scheduler, "timesteps", None)
        if self._patched_in == threading.get_ident() or timesteps is None:
            return False
        return any(then() is timesteps for then in self._timesteps_then) and is_midway(scheduler, timestep)

    def of_call(self, running: Any) -> Any:
        """Return the ``running`` pipeline, or the given one; None where a model alone was given."""
        return (running or self.given()) if self._is_given else None

    def memories_of(self, generation: Generation) -> list[Any]:
        """Return what its models cache for a generation that they take part in."""
        found = (state.memories.get(generation) for state in self.states)  # other threads may forget it
        return [memory for memory in found if memory is not None]

    def set_step(self, index: int, total: int) -> None:
        """Set the step that comes next in this thread; it overrides the scheduler from now on."""
        before = self.given_step.value
        continues = before is not None and index > 0 and index - before.index in (0, 1)
        generation = before.generation if before is not None and continues else Generation(index)
        self.given_step.value = DenoisingStep(index, total, generation)

    @property
    def step_is_given(self) -> bool:
        """Whether this thread was told its step."""
        return self.given_step.value is not None

    def step(
        self, scheduler: Any, timestep: Tensor | float, runs_here: bool, running: Any = None
    ) -> DenoisingStep | None:
        """Return the step that was set in this thread, or else that of :func:`step_of`."""
        return self.given_step.value or step_of(scheduler, timestep, runs_here, row_of_frames(running))

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipeline:
        # The copy of a pipeline is in the memo already when its models are copied.
        copied = Pipeline(memo.get(id(self.given())))
        copied._is_given = self._is_given
        memo[id(self)] = copied
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return Pipeline, (), {"_is_given": self._is_given}


def default_steps(pipe: object) -> int | None:
    """Return the number of steps that a pipeline takes by itself; None for a model alone."""
    if getattr(pipe, "scheduler", None) is None:
        return None
    given = _default_of(pipe, "num_inference_steps")
    return given if isinstance(given, int) else _STEPS


def latent_scale(pipe: object) -> int | None:
    """Return how many pixels wide a position of a pipeline's latents is, or None if it is unknown."""
    names = ("vae_scale_factor", "vae_scale_factor_spatial", "vae_spatial_compression_ratio")
    return next((int(getattr(pipe, name)) for name in names if getattr(pipe, name, None)), None)


def latent_frames(pipe: object, frames: int) -> int:
    """Return the number of latent frames of a video; it is given in those where the scale is unknown."""
    names = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio", "vae_temporal_scale_factor")
    scale = next((int(getattr(pipe, name)) for name in names if getattr(pipe, name, None)), 1)
    return -(-(frames - 1) // scale) + 1


def default_guidance(pipe: object) -> float | None:
    """Return the scale of classifier-free guidance that a pipeline takes by itself, if it is known."""
    if getattr(pipe, "guider", None) is not None or not hasattr(type(pipe), "do_classifier_free_guidance"):
        return guidance_scale(pipe)
    return _number(_default_of(pipe, "guidance_scale"))


def _default_of(pipe: object, name: str) -> object:
    """Return the default of a pipeline's argument, or None if there is no such argument."""
    return getattr(inspect.signature(pipe).parameters.get(name), "default", None) if callable(pipe) else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def is_guided(pipe: Any) -> bool | None:
    """Return whether a pipeline guides without a classifier in the running generation, if it is known.

    Stable Video Diffusion guides each frame by a scale of its own, in a tensor. To see whether it guides
    waits for the device, once for each tensor.
    """
    scale = getattr(pipe, "guidance_scale", None)
    if isinstance(scale, Tensor):
        return once(scale, "guides", partial(_is_guided, pipe), scale)
    return _is_guided(pipe)


def _is_guided(pipe: Any) -> bool | None:
    guided = getattr(pipe, "do_classifier_free_guidance", None)
    return None if guided is None or is_a(pipe, *_DENY_GUIDANCE) else bool(guided)


def guidance_copies(pipe: Any) -> int:
    """Return how many times a batch of ``pipe`` holds each sample, if it batches what guidance compares."""
    # Not all pipelines tell. Then a batch that is twice the same is taken for a guided one.
    told = is_guided(pipe)
    guided = pipe is not None if told is None else told
    perturbed = bool(getattr(pipe, "do_perturbed_attention_guidance", False))
    return 1 + guided + perturbed + (guided and is_a(pipe, *_GUIDED_TWICE))


def guidance_scale(pipe: Any) -> float | None:
    """Return the scale of classifier-free guidance in the running generation, 1 without guidance.

    Pipelines with ``true_cfg_scale``, such as FLUX's, do not tell the running one. The default is taken then.
    Their ``guidance_scale`` is an input of the model. Where no scale is known, the result is None.
    """
    guider = getattr(pipe, "guider", None)
    if guider is not None:
        if not getattr(guider, "_enabled", True):
            return 1.0
        # Its highest scale, from the unguided result on. The original formula counts from the guided result,
        # so that no guidance is 0.
        scales = getattr(guider, "guidance_scales", [getattr(guider, "guidance_scale", None)])
        known = all(isinstance(scale, int | float) for scale in scales)
        original = bool(getattr(guider, "use_original_formulation", False))
        return float(max(scales)) + original if known else None
    guided = is_guided(pipe)
    if guided is None:
        return _number(_default_of(pipe, "true_cfg_scale"))
    return _number(getattr(pipe, "guidance_scale", None) if guided else 1.0)


def scale_in_batch(pipe: Any) -> float | None:
    """Return the scale by which guidance combines a batch whose first part is the unguided one.

    It is None for pipelines that put the guided part first, and where no scale is known.
    """
    return None if is_a(pipe, *_GUIDED_FIRST) else guidance_scale(pipe)


def running_pipeline() -> Any:
    """Return the innermost pipeline on the call stack of this thread, or None."""
    frame = None if torch.compiler.is_compiling() else sys._getframe(1)  # no graph can read a call stack
    while frame is not None:  # without a call for each frame, since every call of a model searches
        if frame.f_code.co_varnames[:1] == ("self",):
            owner = frame.f_locals.get("self")
            if "scheduler" in getattr(owner, "__dict__", ()) and is_pipeline(owner):
                return owner
        frame = frame.f_back
    return None


def is_pipeline(owner: Any) -> bool:
    """Return whether an object has a diffusers scheduler, and is no module."""
    scheduler = getattr(owner, "__dict__", {}).get("scheduler")
    return scheduler is not None and hasattr(scheduler, "timesteps") and not isinstance(owner, nn.Module)
