"""From the axes of a benchmark to its cells: every setting, and the cells that take turns at each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import product
from typing import Any

import torch

from tokenmerge.errors import ConfigError
from tokenmerge.measure.bench.loaded_model import ModelFacts, find_facts
from tokenmerge.measure.bench.options import BenchOptions
from tokenmerge.measure.bench.variants import DENSE, FEWER_STEPS, VARIANTS, VariantSpec
from tokenmerge.measure.pipelines.settings import dtype_name, resolve_dtype, scheduler_class_name
from tokenmerge.measure.pipelines.sizes import check_size, parse_size

__all__ = ["FUSED", "Cell", "Setting", "plan_cells"]

# Attention of the dense run that all speed-ups are relative to.
FUSED = "sdpa"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What cells that take turns have in common; width and height in pixels."""

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
class Cell:
    """What is measured at a setting: a variant, and how it runs.

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

    def dense(self, attention: str | None = None) -> Cell:
        """The dense cell beside it, with its own attention or another."""
        return Cell(VariantSpec(DENSE), attention or self.attention, self.compile)

    def of(self, spec: VariantSpec) -> Cell:
        """The cell of another variant beside it."""
        return Cell(spec, self.attention, self.compile)

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


def plan_cells(options: BenchOptions, device: torch.device) -> tuple[list[Setting], tuple[Cell, ...]]:
    """The settings of a benchmark, and the cells that are measured at each of them.

    Dense is always among the cells, with each attention that is asked for and with fused attention, so that
    what fused attention gains is never credited to merging.

    Args:
        options: the axes.
        device: where it will run; it decides what dtype ``"auto"`` is.

    Returns:
        The settings, ordered so that each model is loaded once per dtype; and the cells, dense ones first,
        fewer steps last.

    Raises:
        ConfigError: a model is unknown, a size does not fit it, or a dtype not the device.
    """
    if options.scheduler is not None:
        scheduler_class_name(options.scheduler)
    dtypes = dict.fromkeys(dtype_name(resolve_dtype(dtype, device)) for dtype in options.dtype)
    settings = []
    for model in dict.fromkeys(options.model):
        facts = find_facts(model)
        sizes = [_size(text, model, facts) for text in options.size or ("",)]
        for dtype, (width, height), batch in product(dtypes, sizes, options.batch):
            settings.append(
                Setting(
                    model=model,
                    scope=options.scope,
                    width=width,
                    height=height,
                    frames=options.frames if facts.video else None,
                    batch=batch,
                    dtype=dtype,
                    steps=options.steps,
                    scheduler=options.scheduler,
                    guidance=options.guidance,
                    seed=options.seed,
                    rounds=options.rounds,
                    warmup=options.warmup,
                )
            )
    return settings, tuple(_cells(options))


def _size(text: str, model: str, facts: ModelFacts) -> tuple[int, int]:
    size = parse_size(text) if text else facts.size
    if size is None:
        raise ConfigError(f"size: {model} does not say what size it was made for; give --size")
    check_size(size, facts.multiple)
    return size


def _cells(options: BenchOptions) -> Iterable[Cell]:
    specs = options.specs()
    fewer_steps = [spec for spec in specs if spec.name == FEWER_STEPS]
    applied = [spec for spec in specs if spec.name not in (DENSE, FEWER_STEPS)]
    for compiled in dict.fromkeys(options.compile):
        for attention in dict.fromkeys((FUSED, *options.attention)):
            yield Cell(VariantSpec(DENSE), attention, compiled)
        for attention, spec in product(dict.fromkeys(options.attention), applied):
            yield Cell(spec, attention, compiled)
    for compiled, attention, spec in product(
        dict.fromkeys(options.compile), dict.fromkeys(options.attention), applied if fewer_steps else ()
    ):
        if VARIANTS[spec.name].is_faster:
            fewer = VariantSpec(FEWER_STEPS, (("as", spec.label),))
            yield Cell(fewer, attention, compiled, merged=spec)
