"""Turns the axes of a benchmark into settings, and into the cells that are measured at each setting."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import product
from typing import Any

import torch

from tokenmerge.errors import ConfigError
from tokenmerge_tools.bench.grid import BenchOptions
from tokenmerge_tools.bench.loaded_model import ModelInfo, find_info
from tokenmerge_tools.pipelines.settings import check_size, dtype_name, parse_size, resolve_dtype
from tokenmerge_tools.variants.variant import DENSE, Variant

# The attention of the dense run that all speed-ups are relative to.
FUSED = "sdpa"
# Options that all settings of a benchmark share.
_SHARED = ("steps", "guidance", "seed", "rounds", "warmup")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """The conditions that all cells with interleaved calls share. Width and height are in pixels."""

    model: str
    width: int
    height: int
    frames: int | None
    batch: int
    dtype: str
    steps: int
    guidance: float | None
    seed: int
    rounds: int
    warmup: int


@dataclasses.dataclass(frozen=True)
class Cell:
    """One measurement at a setting: a variant, and how it runs."""

    spec: Variant
    attention: str
    compile: bool

    def dense(self, attention: str | None = None) -> Cell:
        """Return the dense cell to compare with. By default, it has the same attention."""
        return Cell(Variant(DENSE), attention or self.attention, self.compile)

    def conditions(self) -> dict[str, Any]:
        """Return the conditions of a record that this cell determines."""
        return {
            "variant": self.spec.name,
            "settings": dict(self.spec.settings),
            "attention": self.attention,
            "compile": self.compile,
        }

    def __str__(self) -> str:
        return f"{self.spec.label}, {self.attention}{', compiled' if self.compile else ''}"


def plan_cells(options: BenchOptions, device: torch.device) -> tuple[list[Setting], tuple[Cell, ...]]:
    """Return the settings of a benchmark, and the cells that are measured at each of them.

    There is always a dense cell with each requested attention and one with fused attention. This separates
    the gain of fused attention from the gain of merging.

    Settings are ordered so that each model is loaded once per dtype. Dense cells come first. The meaning of
    the dtype ``"auto"`` depends on the device.
    """
    dtypes = dict.fromkeys(dtype_name(resolve_dtype(dtype, device)) for dtype in options.dtype)
    settings = []
    for model in dict.fromkeys(options.model):
        info = find_info(model)
        sizes = [_size(text, model, info) for text in options.size or ("",)]
        for dtype, (width, height), batch in product(dtypes, sizes, options.batch):
            same = {name: getattr(options, name) for name in _SHARED}
            frames = options.frames if info.video else None
            size = {"width": width, "height": height, "frames": frames}
            settings.append(Setting(model=model, **size, batch=batch, dtype=dtype, **same))
    return settings, tuple(_cells(options))


def _size(text: str, model: str, info: ModelInfo) -> tuple[int, int]:
    size = parse_size(text) if text else info.size
    if size is None:
        raise ConfigError(f"size: {model} has no default size; give --size")
    check_size(size, info.multiple)
    return size


def _cells(options: BenchOptions) -> Iterable[Cell]:
    applied = [spec for spec in options.specs() if spec.name != DENSE]
    for compiled in dict.fromkeys(options.compile):
        for attention in dict.fromkeys((FUSED, *options.attention)):
            yield Cell(Variant(DENSE), attention, compiled)
        for attention, spec in product(dict.fromkeys(options.attention), applied):
            yield Cell(spec, attention, compiled)
