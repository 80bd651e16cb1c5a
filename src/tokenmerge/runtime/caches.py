"""What layers and blocks keep for others, and from one step for the next; copies of a model begin anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from tokenmerge.config import MergeSettings
from tokenmerge.ops import Plan

__all__ = [
    "Call",
    "Change",
    "Changes",
    "Guided",
    "Inside",
    "Plans",
    "Seen",
    "SeenWith",
    "Shapes",
    "Stack",
    "change_of",
    "changed",
    "since",
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
    """What a block adds to the tokens that it is called with, or the result of a layer, which is added later.

    Attributes:
        alone: whether its result is one tensor, and not a tuple.
        latest: what it added when it last ran, to each tensor of its result.
        growth: by how much that grew since it ran before, 0 where it did not; None where nobody asks.
        steady: how far the growth kept its direction, 0 to 1 for each image; None with ``growth``.
    """

    alone: bool
    latest: tuple[Tensor | None, ...]
    growth: tuple[Tensor | None, ...] | None = None
    steady: tuple[Tensor | None, ...] | None = None


# Which call it is: of the model in its step, as pipelines make several for prompts or tiles; and of the block
# in that, as FreeNoise calls it for some frames after others.
Call = tuple[int, int]


class Plans(NotCopied, dict[Call, Plan]):
    """The plans that a block, or all blocks with one token grid, use again."""


class Changes(NotCopied, dict[Call, Change]):
    """What a block or layer changed in the last steps that it ran in."""


class Shapes(NotCopied, dict[Call, Any]):
    """What results look like that nobody takes: tensors, or tuples of them, without memory."""


class Guided(NotCopied, dict[int, Tensor]):
    """What guidance changed in a model's result, by the number of the call that planned."""


class Seen(NamedTuple):
    """What a block ran with.

    Attributes:
        settings: that held.
        size: images and tokens of its plan; None: nothing merged.
        plan: that was used; None: none.
    """

    settings: MergeSettings
    size: tuple[int, int] | None
    plan: Plan | None


class SeenWith(NotCopied, WeakIdKeyDictionary):
    """What a block ran with, by its tokens, as long as these are there: that of :class:`Seen`."""


class Inside(NamedTuple):
    """What the blocks of a stack run with.

    Attributes:
        plan: of the first.
        tokens: that the first was called with.
        merged: these, merged.
    """

    plan: Plan
    tokens: Tensor
    merged: Tensor


class Stack(NotCopied):
    """A run of blocks that are merged once.

    Attributes:
        inside: from its first block to its last; None: nothing is merged.
    """

    def __init__(self) -> None:
        self.inside: Inside | None = None


def change_of(result: Any, bases: Sequence[Tensor | float]) -> Change:
    """What a block or layer has changed: its result, a tensor or several, less what each was added to."""
    return Change(isinstance(result, Tensor), _each(torch.sub, _tensors(result), bases))


def since(before: Change | None, change: Change) -> Change:
    """A change and how it grew since the block ran before."""
    latest = change.latest
    if before is None or before.growth is None or not _alike(latest, before.latest):
        growth = _each(torch.zeros_like, latest)
        return Change(change.alone, latest, growth, _each(_agreement, growth, growth))
    growth = _each(torch.sub, latest, before.latest)
    return Change(change.alone, latest, growth, _each(_agreement, growth, before.growth))


def changed(change: Change, bases: Sequence[Tensor | float], ahead: Tensor) -> Any:
    """A block's result, if its change goes on as it did.

    In a straight line (TaylorSeer, arXiv 2503.06923, order 1) as far as that line was straight before. What
    turns about between steps, as under strong guidance, stays where it is: going on would double the error.

    Args:
        change: of the last step that it ran in, with its growth.
        bases: what is added to.
        ahead: steps since then, divided by those between the last two that it ran in.
    """
    assert change.growth is not None
    assert change.steady is not None
    result = _each(torch.add, change.latest, bases)
    result = _each(
        lambda value, growth, steady: value + growth * (steady * ahead), result, change.growth, change.steady
    )
    return result[0] if change.alone else result


def _alike(ones: Tensors, others: Tensors) -> bool:
    return [one if one is None else one.shape for one in ones] == [
        other if other is None else other.shape for other in others
    ]


def _agreement(growth: Tensor, before: Tensor) -> Tensor:
    """How far each image's growth keeps its direction, 0 to 1: the cosine, or 0 where it turns back."""
    cosine = torch.cosine_similarity(growth.flatten(1).float(), before.flatten(1).float(), dim=1)
    return cosine.clamp(min=0).to(growth.dtype).view(-1, *[1] * (growth.ndim - 1))


def _each(function: Callable[..., Tensor], *values: Sequence[Tensor | float | None]) -> tuple[Any, ...]:
    """The function of the first of each sequence, of the second of each …; None where one of them is None."""
    return tuple(
        None if any(one is None for one in ones) else function(*ones) for ones in zip(*values, strict=True)
    )


def _tensors(result: Any) -> tuple[Tensor | None, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)
