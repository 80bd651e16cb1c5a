"""What parts of a model cache: plans, and what they added in steps that ran them, for other steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from tokenmerge.config import MergeSettings
from tokenmerge.models.placement import Shard
from tokenmerge.ops.plan import Plan

# For each tensor of a result: a tensor, or None.
Tensors = tuple[Any, ...]

_SHORTEST = 1e-8  # of a vector with a direction, as in torch.cosine_similarity
_PIECE = (
    2**20
)  # numbers of an image that are multiplied in float32 at once, unless that makes too many pieces
_PIECES = 16  # at most
# A call of a block, as two numbers. The first is that of the model's call in its step: pipelines make several
# calls in a step, for prompts or tiles. The second is that of the block's call within it: FreeNoise calls a
# block several times, for some frames after others.
CallNumbers = tuple[int, int]


@dataclasses.dataclass(eq=False)
class Cache:
    """What one block, layer or stage caches between calls."""

    # Blocks may share the dictionary.
    plans: dict[CallNumbers, Plan] = dataclasses.field(default_factory=dict)
    # What a block or layer added to each tensor of its result; None for those without image.
    residuals: dict[CallNumbers, Tensors] = dataclasses.field(default_factory=dict)
    # A StackResidual for each block of a stack. For a stage that steps skip, a Residual, or tensors without
    # memory in the shapes of a result that no running module reads.
    # So for a module of a span, of which the last one has a SpanResult.
    skippable: dict[CallNumbers, StackResidual | SpanResult | Residual | Tensors] = dataclasses.field(
        default_factory=dict
    )
    dense: bool = False  # a block or layer does not merge, since other people's code looks at it


class BlockMerge(NamedTuple):
    """What a block merges in its running call, with the settings of the step."""

    settings: MergeSettings
    is_dense: bool = True
    images: int = 0  # in its input, unless it is dense
    tokens: int = 0  # of each, padding included
    plan: Plan | None = None  # None on a correction step, which measures what merging would lose
    merges_in_stack: bool = False  # its tokens are merged already, since its stack merges once


class Residual(NamedTuple):
    """What a part of a model adds to its input, cached from the step in which it last ran."""

    latest: Tensors  # what it added to each tensor of its result
    delta: Tensors  # change of ``latest`` since the run before, 0 where there was none
    agreement: Tensors  # how far the delta kept its direction, 0 to 1 for each image


@dataclasses.dataclass(eq=False)
class StackResidual:
    """What one block of a stack of blocks caches, from the last step that ran it."""

    residual: Residual | None = None  # in the first block, that of the whole stack: image and text
    blocks: int = 0  # in the first block, the number of blocks of the stack; 0 where it was interrupted
    single: bool = True  # the block returned one tensor, and not a pair
    no_text: bool = True  # what it returned has no text


@dataclasses.dataclass(eq=False)
class SpanResult:
    """What the last module returned in the step that last ran it."""

    structure: TreeSpec
    leaves: list[Any]  # of the result; None in the place of a tensor that is extrapolated
    places: tuple[int, ...]  # of these tensors among the leaves
    shapes: tuple[torch.Size, ...]  # of these tensors
    bases: tuple[int | None, ...]  # for each, the index of the input that it is added to; None: there is none
    residual: Residual  # a tensor for each place, with the samples along its first axis

    @property
    def nbytes(self) -> int:
        """The memory of what is cached."""
        return sum(tensor.nbytes for tensor in (*self.residual.latest, *self.residual.delta))


def updated(before: Residual | None, latest: Tensors, shard: Shard | None = None) -> Residual:
    """Return the residual after a run that added ``latest`` to the tokens of a shard, or to all tokens."""
    if before is None or each(Tensor.size, latest) != each(Tensor.size, before.latest):
        delta = each(torch.zeros_like, latest)
        delta_before = delta
    else:
        delta = each(torch.sub, latest, before.latest)
        delta_before = before.delta
    return Residual(latest, delta, each(partial(_agreement, shard), delta, delta_before))


def extrapolated(residual: Residual, bases: Sequence[Any], distance: Tensor) -> Tensors:
    """Return the result of a skipped part: its input plus the linearly extrapolated residual.

    TaylorSeer (arXiv 2503.06923) of order 1, damped where the residual changed its direction: what turns back
    between steps, as under strong guidance, is not extrapolated, since that would double the error. The
    ``distance`` is the steps since the last run, divided by the interval between the last two.
    """
    return each(
        lambda value, delta, agreement: value + delta * (agreement * distance),
        each(torch.add, residual.latest, bases),
        residual.delta,
        residual.agreement,
    )


def _agreement(shard: Shard | None, delta: Tensor, before: Tensor) -> Tensor:
    """Return how far each image's delta keeps its direction: the cosine, or 0 where it turns back."""
    now = delta.flatten(1)
    then = before.flatten(1)
    dtype = torch.promote_types(delta.dtype, torch.float32)
    # In half precision, a copy of all in float32 would take as much memory as the whole residual.
    size = now.shape[1] if delta.dtype == dtype else max(_PIECE, -(-now.shape[1] // _PIECES))
    pieces = zip(now.split(size, dim=1), then.split(size, dim=1), strict=True)
    product = torch.stack([(one.to(dtype) * other.to(dtype)).sum(1) for one, other in pieces]).sum(0)
    lengths = torch.stack([torch.linalg.vector_norm(tensor, dim=1, dtype=dtype) for tensor in (now, then)])
    if shard is not None:
        product, *squares = shard.total(torch.stack([product, *lengths.square()]))
        lengths = torch.stack(squares).sqrt()
    cosine = product / lengths.clamp(min=_SHORTEST).prod(0)
    return cosine.clamp(min=0).to(delta.dtype).view(-1, *[1] * (delta.ndim - 1))


def each(function: Callable[..., Any], *values: Sequence[Any]) -> Tensors:
    """Apply a function to the first values of some sequences, then to the second, and so on.

    Where one of the values is None, the result is None.
    """
    results = []
    for ones in zip(*values, strict=True):
        is_there = all(one is not None for one in ones)
        results.append(function(*ones) if is_there else None)
    return tuple(results)
