"""Which denoising step a scheduler of diffusers is at, and which generation the step belongs to."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import torch
from torch import Tensor

# The attribute by which a scheduler's tensor of timesteps holds its generation. ``set_timesteps`` makes a new
# tensor for each generation, and a deep copy of the tensor takes the attribute along.
_GENERATION = "_tokenmerge_generation"
# The attribute by which timesteps on a device hold a copy on the CPU.
_ON_CPU = "_tokenmerge_on_cpu"
# Noise before the last step, as a share of the first, that is almost none.
_ALMOST_NONE = 0.02


class Generation:
    """One run of a scheduler over its timesteps, or of a loop that calls ``Patch.at_step``.

    What is cached between steps lives as long as this object: until the scheduler gets new timesteps.

    ``first`` is the index of its first step, since image-to-image does not begin at 0, and ``index`` that of
    the latest. It began in ``thread``.
    """

    def __init__(self, first: int, ends_clean: bool = False) -> None:
        self.first = self.index = first
        self.ends_clean = ends_clean
        self.thread = threading.get_ident()

    @property
    def is_of_this_thread(self) -> bool:
        """Whether it began in the running thread."""
        return self.thread == threading.get_ident()

    def __deepcopy__(self, memo: dict[int, Any]) -> Generation:
        # Pipelines that draw tiles give each tile a deep copy of the scheduler's state.
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Generation, (self.first, self.ends_clean)


@dataclasses.dataclass(frozen=True)
class DenoisingStep:
    """A denoising step: its index among the ``total`` steps of its scheduler, from 0, and its generation."""

    index: int
    total: int
    generation: Generation

    @property
    def done(self) -> int:
        """Number of steps of the generation before this one."""
        return self.index - self.generation.first

    @property
    def steps(self) -> int:
        """Number of steps of the generation."""
        return self.total - self.generation.first


def scheduler_of(pipe: Any, timestep: Tensor | float) -> Any:
    """Return the scheduler of a pipeline that a timestep is from; None: it has none.

    Some pipelines have an ``inverse_scheduler`` too, which turns a picture into noise.
    """
    for name, value in getattr(pipe, "__dict__", {}).items():
        if name.endswith("_scheduler") and _offset(timestep, getattr(value, "timesteps", None)) is not None:
            return value
    return getattr(pipe, "scheduler", None)


def step_of(scheduler: Any, timestep: Tensor | float, runs_here: bool = True) -> DenoisingStep | None:
    """Return the step that a scheduler of diffusers is at; None: it does not say.

    The timestep that the model is called with is for schedulers that do not count their steps. Unless the
    generation is known to run in this thread (``runs_here``), one of another thread is only read.
    """
    timesteps = getattr(scheduler, "timesteps", None)
    if timesteps is None or len(timesteps) == 0 or _is_unused(scheduler):
        return None
    index = getattr(scheduler, "step_index", None)
    # The counter is None before the first step. Image-to-image begins at a later one.
    index = getattr(scheduler, "begin_index", None) if index is None else index
    if index is None:
        index = _offset(timestep, timesteps)
    if index is None:
        now, scheduled = _read(timestep, timesteps)
        index = _place(now, scheduled, made=getattr(scheduler, "counter", 0))
        # Flow-matching models get the timestep as a share of the highest one. There 1 is ambiguous: it is
        # also one of the last timesteps.
        if hasattr(scheduler, "step_index") and (index is None or now <= 1):
            index = 0
    if index is None or index >= len(timesteps):  # a generation that is over
        return None
    generation = _generation_of(scheduler, timesteps, int(index), runs_here)
    return None if generation is None else DenoisingStep(int(index), len(timesteps), generation)


def ends_clean(sigmas: Any) -> bool:
    """Return whether flow matching has almost no noise left before its last step, which then changes little.

    It has with the schedule of Stable Diffusion 3, but not with that of FLUX.1. ``sigmas`` are the noise
    levels of the steps and, at the end, that of the picture. Those of other models begin above 1.
    """
    return len(sigmas) > 2 and float(sigmas[-2]) <= _ALMOST_NONE and float(sigmas[0]) <= 1


def schedule_ends_clean(scheduler: Any) -> bool:
    """Return whether a scheduler's latest timesteps are of flow matching and :func:`ends_clean`."""
    if not is_flow(scheduler) or not hasattr(scheduler, "sigmas") or torch.compiler.is_compiling():
        return False
    trained = getattr(getattr(scheduler, "config", None), "num_train_timesteps", 1000)
    # The noise levels are read from the timesteps, which others read too.
    _, scheduled = _read(0.0, scheduler.timesteps)
    return ends_clean([*(scheduled / trained).tolist(), 0.0])


def is_flow(scheduler: Any) -> bool:
    """Return whether a scheduler is of flow matching."""
    config = getattr(scheduler, "config", {})
    return "FlowMatch" in type(scheduler).__name__ or bool(config.get("use_flow_sigmas", False))


def needs_sync(value: Tensor) -> bool:
    """Return whether reading a tensor's value would break a graph or synchronise the device."""
    return torch.compiler.is_compiling() or value.device.type != "cpu"


def generation_of(timesteps: Any) -> Generation | None:
    """Return the generation that a scheduler's timesteps belong to; None: it has not begun."""
    generation: Generation | None = getattr(timesteps, _GENERATION, None)
    return generation


def _generation_of(scheduler: Any, timesteps: Any, index: int, runs_here: bool) -> Generation | None:
    """Return the generation of timesteps; a new one where they are new or the index goes back."""
    generation = generation_of(timesteps)
    if generation is not None and not (runs_here or generation.is_of_this_thread):
        return generation
    if generation is None or index < generation.index:
        generation = Generation(index, schedule_ends_clean(scheduler))
        try:
            setattr(timesteps, _GENERATION, generation)
        except AttributeError:  # no tensor
            return None
    generation.index = index
    return generation


def _offset(timestep: object, timesteps: object) -> int | None:
    """Return the index of a timestep that is a view of ``timesteps``, found without reading its value."""
    if not (isinstance(timestep, Tensor) and isinstance(timesteps, Tensor)) or timesteps.ndim != 1:
        return None
    # One value, perhaps expanded for each image of a batch.
    one = timestep.numel() == 1 or (timestep.numel() > 1 and not any(timestep.stride()))
    if not one or timestep.is_meta or timestep.dtype != timesteps.dtype:
        return None
    memory, stride = timesteps.untyped_storage().data_ptr(), timesteps.stride(0)
    if not memory or timestep.untyped_storage().data_ptr() != memory or stride < 1:  # 0: it has no address
        return None
    place, between = divmod(int(timestep.storage_offset() - timesteps.storage_offset()), stride)
    return place if not between and 0 <= place < len(timesteps) else None


def _is_unused(scheduler: Any) -> bool:
    """Return whether the scheduler still has its training timesteps: another scheduler is in use."""
    training = getattr(getattr(scheduler, "config", None), "num_train_timesteps", None)
    return getattr(scheduler, "num_inference_steps", None) is None and len(scheduler.timesteps) == training


def _read(timestep: Tensor | float, timesteps: Any) -> tuple[float, Tensor]:
    """Return the highest timestep of a call, and the timesteps of a scheduler on the CPU.

    On a device, this waits for it once. The timesteps are copied in the first call only.
    """
    latest = torch.as_tensor(timestep, dtype=torch.float32).max()
    scheduled = getattr(timesteps, _ON_CPU, None)
    if scheduled is None:
        scheduled = torch.as_tensor(timesteps, dtype=torch.float32).flatten()
        if scheduled.device.type != "cpu":
            if latest.device == scheduled.device:
                scheduled = torch.cat([latest[None], scheduled])
            scheduled = scheduled.cpu()
            if len(scheduled) > len(timesteps):
                latest, scheduled = scheduled[0], scheduled[1:]
            setattr(timesteps, _ON_CPU, scheduled)
    return float(latest), scheduled


def _place(timestep: float, scheduled: Tensor, made: int) -> int | None:
    """Return the index of the timestep that a model is called with; None: it is in another unit.

    ``made`` is the number of steps made so far. PNDM counts them, and some of its timesteps are equal.
    """
    distance = (scheduled - timestep).abs()
    nearest = distance.min()
    if nearest > max(1.0, abs(timestep)) / 128:  # half precision is good to 1 in 256
        return None
    places = (distance == nearest).nonzero().flatten().tolist()
    return next((place for place in places if place >= made), places[-1])
