"""Which programs compute by the arithmetic of exports."""

from __future__ import annotations

import pytest
import torch
from torch.torch_version import TorchVersion

from tokenmerge.ops.arithmetic import arithmetic
from tokenmerge.ops.exported_arithmetic import ExportedArithmetic


class Choosing(torch.nn.Module):
    """Adds 1 where it computes by the arithmetic of exports, and 2 elsewhere."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (1 if isinstance(arithmetic(), ExportedArithmetic) else 2)


X = torch.zeros(2)


@pytest.mark.parametrize(
    "strict",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                TorchVersion(torch.__version__) < (2, 8), reason="strict exports look like compiled graphs"
            ),
        ),
    ],
)
def test_exported_programs_have_an_arithmetic_of_their_own(strict):
    program = torch.export.export(Choosing(), (X,), strict=strict).module()
    assert program(X).tolist() == [1, 1]
    assert Choosing()(X).tolist() == [2, 2]


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_traced_programs_have_it_too():
    assert torch.jit.trace(Choosing(), (X,), check_trace=False)(X).tolist() == [1, 1]
    assert Choosing()(X).tolist() == [2, 2]


def test_compiled_graphs_compute_as_pytorch_does():
    """Before torch 2.13, torch.compiler.is_exporting() is True in every graph of torch.compile."""
    assert torch.compile(Choosing(), backend="eager", fullgraph=True)(X).tolist() == [2, 2]
