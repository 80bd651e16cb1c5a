"""Step reuse: residuals of blocks and layers, and what is made of them in steps that skip these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenmerge.models.parallel import Part

Tensors = Sequence[Tensor | None]

_SHORTEST = 1e-8  # of a vector with a direction, as in torch.cosine_similarity


class Residual(NamedTuple):
    """What a block or a layer adds to its input, cached from the step in which it last ran.

    Attributes:
        single: whether its result is one tensor, and not a tuple.
        latest: what it added to each tensor of its result.
        delta: change of ``latest`` since the run before, 0 where there was none; None: nobody extrapolates.
        agreement: how far the delta kept its direction, 0 to 1 for each image; None with ``delta``.
    """

    single: bool
    latest: tuple[Tensor | None, ...]
    delta: tuple[Tensor | None, ...] | None = None
    agreement: tuple[Tensor | None, ...] | None = None


def residual_of(result: Any, bases: Sequence[Tensor | float]) -> Residual:
    """Return the residual of a block or layer: its result less what each tensor was added to."""
    return Residual(isinstance(result, Tensor), _each(torch.sub, _tensors(result), bases))


def updated(before: Residual | None, residual: Residual, part: Part | None = None) -> Residual:
    """Return a residual with its change since the run before; ``part``: the tokens that it is for."""
    latest, agreement = residual.latest, partial(_agreement, part)
    if before is None or before.delta is None or _shapes(latest) != _shapes(before.latest):
        delta = _each(torch.zeros_like, latest)
        return Residual(residual.single, latest, delta, _each(agreement, delta, delta))
    delta = _each(torch.sub, latest, before.latest)
    return Residual(residual.single, latest, delta, _each(agreement, delta, before.delta))


def extrapolated(residual: Residual, bases: Sequence[Tensor | float], distance: Tensor) -> Any:
    """Return the result of a skipped block: its input plus the linearly extrapolated residual.

    TaylorSeer (arXiv 2503.06923) of order 1, damped where the residual changed its direction: what turns back
    between steps, as under strong guidance, is not extrapolated, since that would double the error. The
    ``distance`` is the steps since the last run, divided by the interval between the last two.
    """
    assert residual.delta is not None
    assert residual.agreement is not None
    result = _each(
        lambda value, delta, agreement: value + delta * (agreement * distance),
        _each(torch.add, residual.latest, bases),
        residual.delta,
        residual.agreement,
    )
    return result[0] if residual.single else result


def _shapes(tensors: Tensors) -> list[torch.Size | None]:
    return [None if tensor is None else tensor.shape for tensor in tensors]


def _agreement(part: Part | None, delta: Tensor, before: Tensor) -> Tensor:
    """Return how far each image's delta keeps its direction: the cosine, or 0 where it turns back."""
    now, then = delta.flatten(1).float(), before.flatten(1).float()
    if part is None:
        cosine = torch.cosine_similarity(now, then, dim=1)
    else:
        squares = part.total(torch.stack([(now * then).sum(1), now.square().sum(1), then.square().sum(1)]))
        lengths = squares[1:].sqrt().clamp(min=_SHORTEST)
        cosine = squares[0] / (lengths[0] * lengths[1])
    return cosine.clamp(min=0).to(delta.dtype).view(-1, *[1] * (delta.ndim - 1))


def _each(function: Callable[..., Tensor], *values: Sequence[Tensor | float | None]) -> tuple[Any, ...]:
    """Apply a function to the first values of some sequences, then to the second, …; None stays None."""
    return tuple(
        None if any(one is None for one in ones) else function(*ones) for ones in zip(*values, strict=True)
    )


def _tensors(result: Any) -> tuple[Tensor | None, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)
