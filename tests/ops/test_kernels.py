"""When PyTorch computes and not the kernels in Triton. The folder in_triton tests the kernels themselves."""

from __future__ import annotations

import runpy
import sys
import warnings
from pathlib import Path

import pytest
import torch

from tokenmerge.ops import add_unmerged, kernels, make_plan, most_similar, tiled_matching, unmerge


def started_with(value: str | None, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the kernels are on in a program that starts with this value and without Triton."""
    monkeypatch.delenv("TOKENMERGE_TRITON", raising=False)
    if value is not None:
        monkeypatch.setenv("TOKENMERGE_TRITON", value)
    monkeypatch.setitem(sys.modules, "triton", None)
    return runpy.run_path(str(Path(kernels.__file__)))["ON"]


def test_without_triton_a_warning_says_what_to_install(monkeypatch):
    with pytest.warns(
        UserWarning, match=r"^TOKENMERGE_TRITON=1 asks .*`pip install triton`, or unset"
    ) as seen:
        assert not started_with("1", monkeypatch)
    assert len(seen) == 1


@pytest.mark.parametrize("value", [None, "", "0"])
def test_they_are_off_unless_asked_for(value, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not started_with(value, monkeypatch)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_on_a_cpu_pytorch_computes(device, monkeypatch):
    x, y = torch.randn(2, 64, 8, device=device), torch.randn(2, 32, 8, device=device)
    src, dst = torch.arange(48, device=device), torch.arange(48, 64, device=device)

    def everything() -> list[torch.Tensor]:
        similarity, nearest = most_similar(x, src, dst)
        plan = make_plan(src, dst, similarity.argsort(dim=-1), nearest, 32)
        tiled = tiled_matching(x, (8, 8), (2, 2), src, dst, (2, 2))
        return [similarity, nearest, *tiled, add_unmerged(plan, x, y), x + unmerge(plan, y)]

    expected = everything()
    monkeypatch.setattr(kernels, "ON", True)  # there are no kernels, so calling one would fail
    monkeypatch.setattr(kernels, "devices", {"cuda"})
    found = everything()
    if device == "cpu":
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert torch.equal(*found[-2:])
    assert [one.shape for one in found] == [one.shape for one in expected]
