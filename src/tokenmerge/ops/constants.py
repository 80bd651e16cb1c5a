"""Tensors that depend on sizes and a device alone. Nobody may change them."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmerge.ops.once import made_once


@made_once
def first_numbers(n: int, device: torch.device | str | None) -> Tensor:
    """Return 0 … n−1: ``[n]``."""
    return torch.arange(n, device=device)


@made_once
def first_rows(b: int, n: int, shift: int, device: torch.device | str | None) -> Tensor:
    """Return ``shift`` more than the first row of each of b images of n rows: ``[b, 1]``."""
    return (torch.arange(b, device=device) * n + shift).unsqueeze(1)


@made_once
def rows_of_images(b: int, n: int, device: torch.device | str | None) -> Tensor:
    """Return the rows of b images of n rows: ``[b, n]``."""
    return torch.arange(b * n, device=device).view(b, n)


@made_once
def ones(b: int, n: int, device: torch.device | str | None) -> Tensor:
    """Return float32 ones: ``[b, n]``."""
    return torch.ones(b, n, device=device)
