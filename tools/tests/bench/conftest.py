"""A model that runs in milliseconds, under the name ``geometry:tiny``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenmerge_tools.bench import runner
from tokenmerge_tools.bench.grid import BenchOptions
from tokenmerge_tools.bench.loaded_model import GEOMETRIES, Geometry
from tokenmerge_tools.bench.runner import run_grid
from tokenmerge_tools.records.kinds import CellRecord

UNET = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    "layers_per_block": 1,
    "cross_attention_dim": 8,
    "attention_head_dim": 2,
    "norm_num_groups": 4,
}


def tiny_geometry() -> Geometry:
    return dataclasses.replace(GEOMETRIES["sd15"], title="tiny", config=UNET, size=(64, 64))


@pytest.fixture(autouse=True)
def _tiny_geometry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GEOMETRIES, "tiny", tiny_geometry())


@pytest.fixture(autouse=True)
def _no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "source_commit", lambda: None)  # it has tests of its own, and asks git


@pytest.fixture
def measure(tmp_path: Path) -> Callable[..., list[CellRecord]]:
    """Run a grid on the tiny model, with the file's name and arguments of :class:`BenchOptions`."""

    def run(out: str = "results.jsonl", **axes: object) -> list[CellRecord]:
        grid = BenchOptions(**{"model": ("geometry:tiny",), "rounds": 2, "device": "cpu", **axes})
        return run_grid(grid, tmp_path / out)

    return run
