"""The operations that PyTorch and the runtimes of exported programs need to compute in different ways."""

from __future__ import annotations

import torch

from tokenmerge.ops.exported_arithmetic import ExportedArithmetic
from tokenmerge.ops.pytorch_arithmetic import Arithmetic

_IN_PYTORCH = Arithmetic()
_IN_EXPORTS = ExportedArithmetic()


def arithmetic() -> Arithmetic:
    """Return the arithmetic of PyTorch, or that of exported programs while one is made."""
    # In the graphs of torch.compile, torch.compiler.is_exporting() is True too before torch 2.13.
    exporting = torch.compiler._is_exporting_flag or torch.jit.is_tracing()  # type: ignore[attr-defined]
    return _IN_EXPORTS if exporting else _IN_PYTORCH
