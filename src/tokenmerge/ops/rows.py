"""Sums of rows."""

from __future__ import annotations

import torch
from torch import Tensor


def add_rows(total: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """Add each of the rows ``[r, …]`` to the row of ``total`` ``[m, …]`` at its index ``[r]``, in place.

    Several rows may have the same index. In an exported program this is an addition of elements: ONNX has an
    addition of rows as well (``ScatterND``), but ONNX Runtime runs it in several threads that lose summands
    (microsoft/onnxruntime#18048).
    """
    if not torch.compiler.is_exporting():
        return total.index_add_(0, index, rows)
    return total.scatter_add_(0, index.view(-1, *[1] * (rows.dim() - 1)).expand_as(rows), rows)
