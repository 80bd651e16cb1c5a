"""Guidance calls a model on the same sample with several prompts: in one batch, or one call after another.

Both prompts share a plan; guidance would amplify the difference of two plans.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tokenmerge.ops import num_tokens
from tokenmerge.runtime.steps.step_seed import same_step


class SampleTracker:
    """Whether a call of a model is on the same sample, at the same step, as the one before it.

    Attributes:
        trackable: whether it can be seen that another call is on the sample of the running one.
        repeated: whether the running call is on the sample of the one before it.
        result: of the call before it, where guidance is compared.
    """

    def __init__(self) -> None:
        self.trackable = self.repeated = False
        self.result: Tensor | None = None
        self._sample: weakref.ref[Tensor] | None = None
        self._version = -1
        self._step: Tensor | None = None

    def begin_call(self, sample: Tensor, step: Tensor, gone: Callable[[], None]) -> None:
        """Note a call; ``gone`` is called when its sample is freed, which pipelines do after the step."""
        version = 0 if sample.is_inference() else sample._version  # tensors made in inference mode have none
        same = self._sample is not None and self._sample() is sample and self._version == version
        self.repeated = same and self._step is not None and same_step(self._step, step)
        if self.repeated:
            return

        def let_go(_: object) -> None:
            self.result = None
            gone()

        self._sample, self._version, self._step = weakref.ref(sample, let_go), version, step
        self.trackable, self.result = True, None

    def forget(self) -> None:
        """Note a call whose sample cannot be found again."""
        self.trackable, self.repeated, self._sample, self.result = False, False, None, None


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
    frames = size.mean(dim=1, keepdim=True)
    if size.ndim == 5 and grid[0] == 1:
        frames = frames.flatten(0, 2).unsqueeze(1)
    if frames.ndim == 4:
        frames = frames.unsqueeze(2)
    return F.adaptive_avg_pool3d(frames, grid).flatten(1)
