"""Which calls of a model belong together: with one number for random draws, or on one sample.

Guidance calls a model on the same sample with several prompts: in one batch, or one call after another. They
share a plan and what is drawn at random; guidance would amplify the difference of two plans.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from tokenmerge.ops import num_tokens
from tokenmerge.ops.arithmetic import arithmetic
from tokenmerge.ops.once import made_once, once, version_of
from tokenmerge.runtime.steps.scheduler import needs_sync


def step_seed(timestep: Tensor | float, device: torch.device) -> Tensor:
    """Return an integer for random draws in a step: the bits of its timestep as a float32, int64.

    The timestep is taken and not a counter. It is the same for both halves of classifier-free guidance, for
    every batch size, and when gradient checkpointing runs a block again. In training each sample may have a
    timestep of its own, and image-to-video models give one to each token; the highest counts for all. The
    same timestep has the same tensor on a device.
    """
    if torch.compiler.is_compiling():
        return _bits(timestep, device)
    if isinstance(timestep, Tensor) and needs_sync(timestep):
        if timestep.is_inference():  # its value may have changed unseen
            return _bits(timestep, device)
        return once(timestep, ("bits", device), partial(_bits, timestep, device), timestep)
    if device.type == "cpu":
        return _bits(timestep, device)
    # Copying the number to the device would wait for the device.
    return _number_on(int(_bits(timestep, torch.device("cpu"))), device)


@made_once
def _number_on(number: int, device: torch.device) -> Tensor:
    return torch.full((), number, device=device)


def _bits(timestep: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(timestep, Tensor) and timestep.ndim and not any(timestep.stride()):
        timestep = timestep[(0,) * timestep.ndim]  # pipelines expand one number
    latest = torch.as_tensor(timestep, device=device, dtype=torch.float32)
    return arithmetic().bits(latest.max() if latest.numel() > 1 else latest.view(()))


def same_step(step: Tensor, other: Tensor) -> bool:
    """Return whether two numbers of steps are equal; a tensor equals itself without being read."""
    return step is other or torch.equal(step, other)


class SampleTracker:
    """Whether a call of a model is on the same sample, at the same step, as the one before it."""

    def __init__(self) -> None:
        self.forget()

    @property
    def trackable(self) -> bool:
        """Whether it can be seen that another call is on the sample of the running one."""
        return self._last is not None

    def forget(self) -> None:
        """Note a call whose sample cannot be found again."""
        self.repeated = False  # the running call is on the sample of the one before it
        self.result: Tensor | None = None  # of the call before it, where guidance is compared
        self._last: tuple[weakref.ref[Tensor], int | None, Tensor] | None = None

    def begin_call(self, sample: Tensor, step: Tensor, gone: Callable[[object], None]) -> None:
        """Note a call; ``gone`` is called when its sample is freed, which pipelines do after the step."""
        version, self.repeated = version_of(sample), False
        if self._last is not None:
            last, known, step_then = self._last
            self.repeated = last() is sample and known == version and same_step(step_then, step)
        if not self.repeated:
            self._last, self.result = (weakref.ref(sample, gone), version, step), None


def copies_are_equal(sample: Tensor | Sequence[Tensor], copies: int) -> Tensor | None:
    """Return whether a batch holds the same samples several times, as a tensor; None: it cannot."""
    b, others = divmod(len(sample), copies)
    if copies == 1 or others or sample[0].is_meta:
        return None
    pairs = [(sample[i], sample[i % b]) for i in range(b, len(sample))]
    if any(x.shape != first.shape for x, first in pairs):
        return None
    return torch.stack([(x == first).all() for x, first in pairs]).all()


def importance_of_tokens(change: Tensor, *grids: tuple[int, int, int]) -> Tensor | None:
    """Return how much guidance changes each token, for planners (arXiv 2411.16720).

    ``change`` is what guidance changes in a model's result: ``[b, c, h, w]``, ``[b, c, f, h, w]``, or tokens
    ``[b, n, c]`` on the model's finest grid; None is returned for other shapes. The mean absolute change over
    the area of each token is ``[b, n]``, or ``[b · f, n]`` for a result of several frames and a grid of one.
    """
    size = change.abs().float()
    if size.ndim == 3:
        tokens = size.mean(dim=2)
        return tokens if tokens.shape[1] == sum(map(num_tokens, grids)) else None
    grid = grids[0]
    if size.ndim not in (4, 5) or (size.ndim == 4 and grid[0] > 1) or len(grids) > 1:
        return None
    frames = size.shape[2] if grid[0] > 1 else 1
    size = size.mean(dim=1).reshape(-1, 1, frames, *size.shape[-2:])
    return F.adaptive_avg_pool3d(size, grid).flatten(1)
