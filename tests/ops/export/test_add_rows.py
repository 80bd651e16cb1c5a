"""Sums of rows, also in an exported program that several threads run."""

from __future__ import annotations

import onnxruntime
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tokenmerge.ops.arithmetic import arithmetic


class Sum(nn.Module):
    def forward(self, total, index, rows):
        return arithmetic().add_rows(total.clone(), index, rows)


def example(*width: int):
    draw = torch.Generator().manual_seed(0)
    # Whole numbers, so that the order of the summands does not matter.
    rows = torch.randint(-8, 9, (40_000, *width), generator=draw).float()
    index = torch.randint(2_048, (40_000,), generator=draw)
    return torch.randint(-8, 9, (2_048, *width), generator=draw).float(), index, rows


@pytest.mark.parametrize("width", [(), (3,)])
def test_rows_are_added_as_in_a_loop(width):
    total, index, rows = (x[:50] for x in example(*width))
    index = index % 50
    expected = total.clone()
    for i, row in zip(index.tolist(), rows, strict=True):
        expected[i] += row
    assert_close(torch.export.export(Sum(), (total, index, rows)).module()(total, index, rows), expected)
    given = total.clone()
    assert arithmetic().add_rows(given, index, rows) is given
    assert_close(given, expected)


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")  # torch
@pytest.mark.parametrize("width", [(), (64,)])
def test_an_exported_program_loses_no_summand(width, tmp_path):
    """ONNX Runtime adds whole rows in several threads, which overwrite each other's results."""
    given = example(*width)
    program = torch.onnx.export(Sum().eval(), given, dynamo=True, verbose=False)
    # The threads do not always collide.
    assert "ScatterND" not in {node.op_type for node in program.model.graph}
    program.save(tmp_path / "sum.onnx")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    session = onnxruntime.InferenceSession(tmp_path / "sum.onnx", options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    feeds = {name: x.numpy() for name, x in zip(names, given, strict=True)}
    expected = Sum()(*given)
    for _ in range(5):
        (found,) = session.run(None, feeds)
        assert_close(torch.from_numpy(found), expected, rtol=0, atol=0)
