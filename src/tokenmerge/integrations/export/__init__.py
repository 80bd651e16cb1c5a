"""How exported and traced programs compute what their runtimes cannot compute as PyTorch does.

Importing it is enough: :mod:`tokenmerge.ops` uses this arithmetic while a program is exported or traced.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmerge.integrations.export.bits import bits_by_arithmetic
from tokenmerge.integrations.export.limbs import remainders, upper_bits
from tokenmerge.ops.arithmetic import Arithmetic, Draw, use_in_exports


class ExportedArithmetic(Arithmetic):
    """The same results with small integers alone, without views of another dtype or added rows."""

    def bits(self, value: Tensor) -> Tensor:
        """Compute the exponent and the digits, without a view of another dtype."""
        return bits_by_arithmetic(value)

    def remainders(self, size: int, draw: Draw, n: int, device: torch.device | str | None) -> Tensor:
        """Compute from limbs of few bits."""
        return remainders(size, *draw, n, device)

    def upper_bits(self, draw: Draw, n: int, device: torch.device | str | None) -> Tensor:
        """Compute from limbs of few bits."""
        return upper_bits(*draw, n, device)

    def add_rows(self, total: Tensor, index: Tensor, rows: Tensor) -> Tensor:
        """Add single elements instead of rows.

        ONNX can add rows too (``ScatterND``). But ONNX Runtime does so in several threads, which lose
        summands (microsoft/onnxruntime#18048), and PyTorch's older ONNX export keeps one of the rows with the
        same index.
        """
        return total.scatter_add(0, index.view(-1, *[1] * (rows.dim() - 1)).expand_as(rows), rows)


use_in_exports(ExportedArithmetic())
