"""What layers and blocks keep from one denoising step for those after it; copies of a model begin anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenmerge.ops import Plan

__all__ = [
    "Call",
    "Change",
    "Changes",
    "Corrections",
    "Guided",
    "Plans",
    "add_correction",
    "change_of",
    "changed",
    "correction_of",
]

Tensors = Sequence[Tensor | None]


class NotCopied:
    """Begins anew in copies and pickles of a model."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = copied = type(self)()
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class Change(NamedTuple):
    """What a block adds to the tokens that it is called with.

    Attributes:
        alone: whether its result is one tensor, and not a tuple.
        latest: what it added when it last ran, to each tensor of its result.
        slope: by how much that grew since it ran before; None where it did not.
    """

    alone: bool
    latest: tuple[Tensor | None, ...]
    slope: tuple[Tensor | None, ...] | None


# Which call it is: of the model in its step, as pipelines make several for prompts or tiles; and of the block
# in that, as FreeNoise calls it for some frames after others.
Call = tuple[int, int]


class Plans(NotCopied, dict[Call, Plan]):
    """The plans that a block, or all blocks with one token grid, use again."""


class Corrections(NotCopied, dict[Call, tuple[Tensor | None, ...]]):
    """What merging loses of each tensor of a result."""


class Changes(NotCopied, dict[Call, Change]):
    """What a block changed in the last steps that it ran in."""


class Guided(NotCopied, dict[int, Tensor]):
    """What guidance changed in a model's result, by the number of the call that planned."""


def correction_of(exact: Any, merged: Any) -> tuple[Tensor | None, ...]:
    """What the merged result of a layer or block lacks."""
    return _each(torch.sub, _tensors(exact), _tensors(merged))


def add_correction(result: Any, correction: Tensors) -> Any:
    """A merged result with what it lacks."""
    corrected = _each(torch.add, _tensors(result), correction)
    return corrected[0] if isinstance(result, Tensor) else corrected


def change_of(result: Any, bases: Sequence[Tensor], before: Change | None) -> Change:
    """What a block has changed.

    Args:
        result: of the block: a tensor, or several.
        bases: what it was added to: one for each tensor of the result.
        before: its change when it ran before.
    """
    latest = _each(torch.sub, _tensors(result), bases)
    if before is None or any(
        (a is None) != (b is None) or (a is not None and b is not None and a.shape != b.shape)
        for a, b in zip(latest, before.latest, strict=True)
    ):
        return Change(isinstance(result, Tensor), latest, None)
    return Change(isinstance(result, Tensor), latest, _each(torch.sub, latest, before.latest))


def changed(change: Change, bases: Sequence[Tensor], ahead: float) -> Any:
    """A block's result, if its change goes on in a straight line (TaylorSeer, arXiv 2503.06923, order 1).

    Args:
        change: of the last step that it ran in.
        bases: what is added to.
        ahead: steps since then, divided by those between the last two that it ran in.
    """
    result = _each(torch.add, bases, change.latest)
    if change.slope is not None:
        result = _each(lambda value, slope: value.add_(slope, alpha=ahead), result, change.slope)
    return result[0] if change.alone else result


def _each(function: Callable[[Tensor, Tensor], Tensor], ones: Tensors, others: Tensors) -> tuple[Any, ...]:
    return tuple(
        None if one is None or other is None else function(one, other)
        for one, other in zip(ones, others, strict=True)
    )


def _tensors(result: Any) -> tuple[Tensor | None, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)
