"""From the axes of a grid to cells: settings, and the columns that are measured in turns at each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import product
from typing import Any

import torch

from tokenmerge.errors import ConfigError
from tokenmerge.measure.bench.grid import Grid
from tokenmerge.measure.bench.loaded_model import ModelFacts, find_facts
from tokenmerge.measure.bench.variants import DENSE, FEWER_STEPS, VARIANTS, VariantSpec
from tokenmerge.measure.pipelines.settings import dtype_name, resolve_dtype, scheduler_class_name
from tokenmerge.measure.pipelines.sizes import check_size, parse_size

__all__ = ["FUSED", "Column", "Group", "Setting", "plan_groups"]

# Attention of the dense run that all speed-ups are told against.
FUSED = "sdpa"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What the cells that are measured in turns have in common; sizes in pixels."""

    model: str
    scope: str
    width: int
    height: int
    frames: int | None
    batch: int
    dtype: str
    steps: int
    scheduler: str | None
    guidance: float | None
    seed: int
    rounds: int
    warmup: int


@dataclasses.dataclass(frozen=True)
class Column:
    """One cell of a setting.

    Args:
        spec: the variant.
        attention: how the model computes attention.
        compile: whether it goes through ``torch.compile``.
        merged: for fewer steps: the variant whose time they fit into.
    """

    spec: VariantSpec
    attention: str
    compile: bool
    merged: VariantSpec | None = None

    def dense(self, attention: str | None = None) -> Column:
        """The dense cell beside it, with its own attention or another."""
        return Column(VariantSpec(DENSE), attention or self.attention, self.compile)

    def of(self, spec: VariantSpec) -> Column:
        """The cell of another variant beside it."""
        return Column(spec, self.attention, self.compile)

    def conditions(self) -> dict[str, Any]:
        """Its part of a record's conditions."""
        return {
            "variant": self.spec.name,
            "settings": dict(self.spec.settings),
            "attention": self.attention,
            "compile": self.compile,
        }

    def __str__(self) -> str:
        return f"{self.spec.label}, {self.attention}{', compiled' if self.compile else ''}"


@dataclasses.dataclass(frozen=True)
class Group:
    """A setting with its columns, dense first, fewer steps last."""

    setting: Setting
    columns: tuple[Column, ...]


def plan_groups(grid: Grid, device: torch.device) -> list[Group]:
    """Every setting of a grid with every column, ordered so that each model is loaded once per dtype.

    Dense is always among the columns, with each attention of the grid and with fused attention, so that
    what fused attention gains is never credited to merging.

    Args:
        grid: the axes.
        device: where it will run; it decides what dtype ``"auto"`` is.

    Raises:
        ConfigError: a model is unknown, a size does not fit it, or a dtype not the device.
    """
    if grid.scheduler is not None:
        scheduler_class_name(grid.scheduler)
    columns = tuple(_columns(grid))
    dtypes = dict.fromkeys(dtype_name(resolve_dtype(dtype, device)) for dtype in grid.dtype)
    groups = []
    for model in dict.fromkeys(grid.model):
        facts = find_facts(model)
        sizes = [_size(text, model, facts) for text in grid.size or ("",)]
        for dtype, (width, height), batch in product(dtypes, sizes, grid.batch):
            setting = Setting(
                model=model,
                scope=grid.scope,
                width=width,
                height=height,
                frames=grid.frames if facts.video else None,
                batch=batch,
                dtype=dtype,
                steps=grid.steps,
                scheduler=grid.scheduler,
                guidance=grid.guidance,
                seed=grid.seed,
                rounds=grid.rounds,
                warmup=grid.warmup,
            )
            groups.append(Group(setting, columns))
    return groups


def _size(text: str, model: str, facts: ModelFacts) -> tuple[int, int]:
    size = parse_size(text) if text else facts.size
    if size is None:
        raise ConfigError(f"size: {model} does not say what size it was made for; give --size")
    check_size(size, facts.multiple)
    return size


def _columns(grid: Grid) -> Iterable[Column]:
    specs = grid.specs()
    fewer_steps = [spec for spec in specs if spec.name == FEWER_STEPS]
    applied = [spec for spec in specs if spec.name not in (DENSE, FEWER_STEPS)]
    for compiled in dict.fromkeys(grid.compile):
        for attention in dict.fromkeys((FUSED, *grid.attention)):
            yield Column(VariantSpec(DENSE), attention, compiled)
        for attention, spec in product(dict.fromkeys(grid.attention), applied):
            yield Column(spec, attention, compiled)
    for compiled, attention, spec in product(
        dict.fromkeys(grid.compile), dict.fromkeys(grid.attention), applied if fewer_steps else ()
    ):
        if VARIANTS[spec.name].is_faster:
            fewer = VariantSpec(FEWER_STEPS, (("as", spec.label),))
            yield Column(fewer, attention, compiled, merged=spec)
