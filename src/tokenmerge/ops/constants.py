"""Tensors that depend on sizes and a device alone, such as the indices of a token grid: made once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

Sizes = ParamSpec("Sizes")
Made = TypeVar("Made")

_MOST = 256  # results of each function that are kept, the latest ones


def made_once(make: Callable[Sizes, Made]) -> Callable[Sizes, Made]:
    """Keep what a function makes, so that other calls with the same arguments launch nothing.

    The arguments are sizes and, as the last one, a device. Nobody may change the tensors that it makes.
    """
    known: dict[object, Made] = {}

    @functools.wraps(make)
    def get(*args: Sizes.args, **kwargs: Sizes.kwargs) -> Made:
        if torch.compiler.is_compiling():  # sizes may be symbolic
            return make(*args, **kwargs)
        empty = torch.empty(0, device=args[-1])  # type: ignore[call-overload]
        if type(empty) is not Tensor:  # FakeTensorMode makes tensors of its own, and takes no others
            return make(*args, **kwargs)
        key = *args[:-1], empty.device
        made = known.get(key)
        if made is None:
            with torch.inference_mode(False):  # autograd cannot save tensors of inference mode
                made = known[key] = make(*args, **kwargs)
            while len(known) > _MOST:
                known.pop(next(iter(known)), None)
        return made

    return get


@made_once
def first_numbers(n: int, device: torch.device | str | None) -> Tensor:
    """Return 0 … n−1: ``[n]``."""
    return torch.arange(n, device=device)


@made_once
def first_rows(b: int, n: int, shift: int, device: torch.device) -> Tensor:
    """Return ``shift`` more than the first row of each of b images of n rows: ``[b, 1]``."""
    return (torch.arange(b, device=device) * n + shift).unsqueeze(1)


@made_once
def rows_of_images(b: int, n: int, device: torch.device) -> Tensor:
    """Return the rows of b images of n rows: ``[b, n]``."""
    return torch.arange(b * n, device=device).view(b, n)


@made_once
def ones(b: int, n: int, device: torch.device) -> Tensor:
    """Return float32 ones: ``[b, n]``."""
    return torch.ones(b, n, device=device)
