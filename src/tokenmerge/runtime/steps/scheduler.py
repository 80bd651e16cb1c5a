"""What a scheduler of diffusers says: the denoising step, its generation, and how it makes a step."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import threading
import weakref
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from tokenmerge.errors import ConfigError
from tokenmerge.models.base import is_a
from tokenmerge.plans import Schedule
from tokenmerge.plans.tolerance import Tolerance

# The attribute by which a scheduler's tensor of timesteps holds its generation. ``set_timesteps`` makes a new
# tensor for each generation, and a deep copy of the tensor takes the attribute along.
_GENERATION = "_tokenmerge_generation"
_ON_CPU = "_tokenmerge_on_cpu"  # that by which timesteps on a device hold a copy on the CPU
_WITH_END = ("DDPMWuerstchenScheduler",)  # their last timestep is that of the image, and of no step
_ALMOST_NONE = 0.02  # noise before the last step, as a share of the first
_NOISY: MutableMapping[Any, bool] = weakref.WeakKeyDictionary()  # schedulers, and whether they add noise


class Generation:
    """One run of a scheduler over its timesteps, or of a loop that calls ``Patch.at_step``.

    What is cached between steps lives as long as this object: until the scheduler gets new timesteps.
    """

    def __init__(self, first: int, schedule: Schedule = Schedule()) -> None:
        self.first = first  # index of its first step, which is not 0 in image-to-image
        self.index = first  # of the latest
        self.filled = 0  # steps before the first one, which filled a cache for the others
        self.schedule = schedule
        self.tolerances: dict[object, Tolerance | None] = {}  # by the DefaultMethod
        # From the first step on, see ``added_noise``; None: the scheduler was not asked.
        self.added_noise: tuple[float | None, ...] | None = None
        self.thread = threading.get_ident()

    def begin_after_filling(self, index: int) -> None:
        """Begin at a step before which all others have filled a cache, and so ran whole."""
        self.filled = index - self.first
        self.first = index

    def __deepcopy__(self, memo: dict[int, Any]) -> Generation:
        # Pipelines that draw tiles give each tile a deep copy of the scheduler's state.
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Generation, (self.first, self.schedule)


@dataclasses.dataclass(frozen=True)
class DenoisingStep:
    """A denoising step: its index among the ``total`` steps of its scheduler, from 0, and its generation."""

    index: int
    total: int
    generation: Generation
    by_frames: bool = False  # frames have timesteps of their own, so the highest one tells no step

    @property
    def done(self) -> int:
        """Number of steps of the generation before this one."""
        return self.index - self.generation.first

    @property
    def steps(self) -> int:
        """Number of steps of the generation."""
        return self.total - self.generation.first


def scheduler_of(pipe: Any, timestep: Tensor | float) -> Any:
    """Return the scheduler of a pipeline that a timestep is from, or None."""
    # Some pipelines have an ``inverse_scheduler`` too, which turns an image into noise.
    # A copy, since another thread that runs the pipeline sets attributes.
    for name, value in getattr(pipe, "__dict__", {}).copy().items():
        if name.endswith("_scheduler") and _offset(timestep, getattr(value, "timesteps", None)) is not None:
            return value
    return getattr(pipe, "scheduler", None)


def row_of_frames(pipe: Any) -> tuple[int, int] | None:
    """Return which of how many iterations a pipeline is at whose frames have timesteps of their own.

    Diffusion forcing denoises later frames with a delay, so that it takes more iterations than its scheduler
    has steps. Such a pipeline tells the timesteps of its frames, which are a row of a matrix, and the number
    of rows. The result is None where all frames have one timestep.
    """
    row = getattr(pipe, "current_timestep", None)
    rows = getattr(pipe, "num_timesteps", None)
    if not isinstance(row, Tensor) or row.ndim != 1 or not isinstance(rows, int):
        return None
    index, within = divmod(int(row.storage_offset()), len(row))
    return (index, rows) if index < rows and not within else None


def step_of(
    scheduler: Any,
    timestep: Tensor | float,
    runs_here: bool = True,
    row: tuple[int, int] | None = None,
) -> DenoisingStep | None:
    """Return the step that a scheduler of diffusers is at, or None if it does not say.

    The timestep that the model is called with is for schedulers that do not count their steps. Unless a
    pipeline with this scheduler ``runs_here``, a generation of another thread is refused. The ``row`` is that
    of :func:`row_of_frames`, which tells the step where there is one.
    """
    timesteps = getattr(scheduler, "timesteps", None)
    if timesteps is None or len(timesteps) == 0:
        return None
    trained = setting_of(scheduler, "num_train_timesteps")
    if getattr(scheduler, "num_inference_steps", None) is None and len(timesteps) == trained:
        return None  # another scheduler is in use
    # The counter is None before the first step. Image-to-image begins at a later one.
    counted = (getattr(scheduler, name, None) for name in ("step_index", "begin_index"))
    index = next((count for count in counted if count is not None), None)
    total = len(timesteps)
    if is_a(scheduler, *_WITH_END):
        total -= 1
    if row is not None:
        index, total = row
    if index is None:
        index = _offset(timestep, timesteps)
    if index is None:
        now, scheduled = _read(timestep, timesteps)
        index = _place(now, scheduled, made=getattr(scheduler, "counter", 0))
        # Flow-matching models get the timestep as a share of the highest one. There 1 is ambiguous: it is
        # also one of the last timesteps.
        if hasattr(scheduler, "step_index") and (index is None or now <= 1):
            index = 0
    if index is None or index >= total:  # a generation that is over
        return None
    index = int(index)
    generation: Generation | None = getattr(timesteps, _GENERATION, None)
    if not (runs_here or generation is None or generation.thread == threading.get_ident()):
        raise ConfigError(
            "the denoising step is unknown: the scheduler that token merging was applied with is at step "
            f"{index} of {total} of a generation in another thread; run a pipeline with a scheduler of its "
            "own in each thread, or call patch.at_step(i, steps) before each step"
        )
    if generation is None or index < generation.index:  # the timesteps are new, or begin again
        schedule = schedule_of(scheduler)
        if not runs_here:  # nobody knows how a loop uses what the model returns
            schedule = schedule._replace(is_euler=False)
        generation = Generation(index, schedule)
        try:
            setattr(timesteps, _GENERATION, generation)
        except AttributeError:  # no tensor
            return None
    generation.index = index
    return DenoisingStep(index, total, generation, by_frames=row is not None)


def is_midway(scheduler: Any, timestep: Tensor | float) -> bool:
    """Return whether a scheduler of diffusers has made steps of its generation, as far as it is known."""
    made = getattr(scheduler, "step_index", None)
    if made is not None:
        return bool(made > (getattr(scheduler, "begin_index", None) or 0))
    return (_offset(timestep, scheduler.timesteps) or 0) > (getattr(scheduler, "begin_index", None) or 0)


def generation_of(scheduler: Any) -> Generation | None:
    """Return the generation with the latest timesteps of a scheduler, or None if none has begun."""
    return getattr(getattr(scheduler, "timesteps", None), _GENERATION, None)


def has_run(scheduler: Any) -> bool:
    """Return whether a generation with the latest timesteps of a scheduler has begun."""
    return generation_of(scheduler) is not None


def is_over(scheduler: Any, timestep: Tensor | float, index: int) -> bool:
    """Return whether a timestep is of an earlier step of the scheduler, as far as its place tells."""
    place = _offset(timestep, getattr(scheduler, "timesteps", None))
    return place is not None and place < index


def repeats(scheduler: Any, index: int) -> bool:
    """Return whether a step has the timestep of the one before; True if reading it would wait."""
    timesteps = scheduler.timesteps
    if isinstance(timesteps, Tensor) and needs_sync(timesteps):
        return True
    return index > 0 and bool(timesteps[index] == timesteps[index - 1])


def is_timestep_of(scheduler: Any, timestep: float, index: int) -> bool:
    """Return whether a timestep is that of a step, in any unit; this may wait for the device."""
    _, scheduled = _read(timestep, scheduler.timesteps)
    return any(_is_near(timestep * unit, float(scheduled[index])) for unit in (1, _trained(scheduler)))


def comes_later(scheduler: Any, timestep: float, index: int) -> bool:
    """Return whether a timestep is that of a later step."""
    return any(
        is_timestep_of(scheduler, timestep, later) for later in range(index + 1, len(scheduler.timesteps))
    )


def _is_near(timestep: float, other: float) -> bool:
    return abs(timestep - other) <= max(1.0, abs(timestep)) / 128  # half precision is good to 1 in 256


def _trained(scheduler: Any) -> int:
    found = getattr(getattr(scheduler, "config", None), "num_train_timesteps", None)
    return found if isinstance(found, int) else 1000


def ends_clean(sigmas: Any) -> bool:
    """Return whether flow matching has almost no noise left before its last step, which then changes little.

    So it is with the schedule of Stable Diffusion 3, but not with that of FLUX.1. ``sigmas`` are the noise
    levels of the steps and, at the end, that of the image. Those of other models begin above 1.
    """
    return len(sigmas) > 2 and float(sigmas[-2]) <= _ALMOST_NONE and float(sigmas[0]) <= 1


def schedule_of(scheduler: Any) -> Schedule:
    """Return what a scheduler of diffusers does with its latest timesteps."""
    if torch.compiler.is_compiling():
        return Schedule()
    return Schedule(_ends_clean(scheduler), adds_noise(scheduler), is_euler(scheduler))


def next_schedule(pipe: Any, steps: int) -> Schedule:
    """Return what the scheduler of a pipeline will do in the next generation."""
    scheduler: Any = getattr(pipe, "scheduler", None)
    noisy = Schedule(adds_noise=adds_noise(scheduler), is_euler=is_euler(scheduler))
    call = inspect.unwrap(type(pipe).__call__)
    # Pipelines such as FLUX's compute noise levels of their own, whose last one is 1/steps.
    if not is_flow(scheduler) or "linspace" in getattr(getattr(call, "__code__", None), "co_names", ()):
        return noisy
    try:
        scheduler = type(scheduler).from_config(scheduler.config)
        scheduler.set_timesteps(steps)
    except Exception:  # no scheduler of diffusers, or one that asks for more
        return noisy
    return noisy._replace(ends_clean=_ends_clean(scheduler))


def adds_noise(scheduler: Any) -> bool:
    """Return whether the steps of a scheduler add new noise."""
    with contextlib.suppress(KeyError, TypeError):
        return _NOISY[scheduler]
    noisy = _makes_noise(scheduler)
    with contextlib.suppress(TypeError):  # of another library, without a hash
        _NOISY[scheduler] = noisy
    return noisy


def _makes_noise(scheduler: Any) -> bool:
    # Steps that add none are linear: of a sample and a model output of zeros, they make zeros.
    try:
        # Those of other people may draw numbers without a generator.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            scheduler = type(scheduler).from_config(scheduler.config)
            scheduler.set_timesteps(4)
            zeros = torch.zeros(1, 1, 1, 1)
            scale = getattr(scheduler, "scale_model_input", lambda sample, _: sample)
            draws = "generator" in inspect.signature(scheduler.step).parameters  # else it needs no numbers
            given = {"generator": torch.Generator()} if draws else {}
            steps = scheduler.timesteps
            made = [scheduler.step(zeros, step, scale(zeros, step), **given)[0].tolist() for step in steps]
    except Exception:  # no scheduler of diffusers, or one whose steps need more
        return False
    return made != [zeros.tolist()] * len(made)


def _ends_clean(scheduler: Any) -> bool:
    if not is_flow(scheduler) or not hasattr(scheduler, "sigmas"):
        return False
    trained = setting_of(scheduler, "num_train_timesteps", 1000)
    _, scheduled = _read(0.0, scheduler.timesteps)  # which others read too
    return ends_clean([*(scheduled / trained).tolist(), 0.0])


def is_flow(scheduler: Any) -> bool:
    """Return whether a scheduler is of flow matching."""
    return "FlowMatch" in type(scheduler).__name__ or bool(setting_of(scheduler, "use_flow_sigmas"))


def is_euler(scheduler: Any) -> bool:
    """Return whether each step adds the model's output, times the change of the noise level.

    So does flow matching with Euler's method. ``sigma_data`` belongs to models whose output is scaled before.
    """
    scaled = setting_of(scheduler, "stochastic_sampling") or setting_of(scheduler, "sigma_data")
    return is_a(scheduler, "FlowMatchEulerDiscreteScheduler") and not scaled


def setting_of(scheduler: Any, name: str, default: Any = None) -> Any:
    """Return a setting in the config of a scheduler: a mapping, an object with attributes, or none at all."""
    config = getattr(scheduler, "config", None)
    found = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return default if found is None else found


def needs_sync(value: Tensor) -> bool:
    """Return whether reading a tensor's value would break a graph or synchronise the device."""
    return torch.compiler.is_compiling() or value.device.type != "cpu"


def _offset(timestep: object, timesteps: object) -> int | None:
    """Return the index of a timestep that is a view of ``timesteps``, found without reading its value."""
    if not (isinstance(timestep, Tensor) and isinstance(timesteps, Tensor)) or timesteps.ndim != 1:
        return None
    # One value, perhaps expanded for each image of a batch.
    one = timestep.numel() == 1 or (timestep.numel() > 1 and not any(timestep.stride()))
    if not one or timestep.is_meta or timestep.dtype != timesteps.dtype:
        return None
    memory = timesteps.untyped_storage().data_ptr()
    stride = timesteps.stride(0)
    if (
        not memory or timestep.untyped_storage().data_ptr() != memory or stride < 1
    ):  # a tensor without memory has the address 0
        return None
    place, between = divmod(int(timestep.storage_offset() - timesteps.storage_offset()), stride)
    return place if not between and 0 <= place < len(timesteps) else None


def waits_to_read(timestep: Tensor | float, scheduler: Any) -> bool:
    """Return whether the step that a scheduler is at can be read only by waiting for a device."""
    timesteps = getattr(scheduler, "timesteps", None)
    tensors = [value for value in (timestep, timesteps) if isinstance(value, Tensor)]
    if all(value.device.type == "cpu" for value in tensors):
        return False
    counts = getattr(scheduler, "step_index", None) is not None
    return not counts and _offset(timestep, timesteps) is None


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
                latest, scheduled = torch.cat([latest[None], scheduled]).cpu().tensor_split([1])
            scheduled = scheduled.cpu()
            setattr(timesteps, _ON_CPU, scheduled)
    return float(latest), scheduled


def _place(timestep: float, scheduled: Tensor, made: int) -> int | None:
    """Return the index of the timestep that a model is called with, or None in another unit.

    ``made`` is the number of steps made so far. PNDM counts them, and some of its timesteps are equal.
    """
    distance = (scheduled - timestep).abs()
    nearest = distance.min()
    if nearest > max(1.0, abs(timestep)) / 128:  # half precision is good to 1 in 256
        return None
    places = (distance == nearest).nonzero().flatten().tolist()
    return next((place for place in places if place >= made), places[-1])
