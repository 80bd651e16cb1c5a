"""The options of ``tokenmerge bench``, its presets, and the settings and cells that are measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch

from tokenmerge.config.checks import Check, integer, number, one_of, optional, switch, text
from tokenmerge.errors import ConfigError
from tokenmerge_tools.bench.loaded_model import find_facts
from tokenmerge_tools.files import read_text, toml_parser
from tokenmerge_tools.method_spec import DEFAULT_SPEEDUP, check_speedup
from tokenmerge_tools.pipelines.options import option
from tokenmerge_tools.pipelines.settings import (
    ATTENTION_HELP,
    DTYPE_CHOICES,
    attention_choice,
    check_guidance,
    check_size,
    dtype_name,
    parse_size,
    resolve_dtype,
)
from tokenmerge_tools.variants.variant import DENSE, VARIANTS, Variant, parse_variant

# The variants that can be applied to a denoiser alone.
CHOICES = tuple(name for name, kind in VARIANTS.items() if name == DENSE or kind.method is not None)

# The grid of each published table.
PRESETS = {path.stem: path for path in sorted((Path(__file__).parent / "presets").glob("*.toml"))}

_CHECKS: dict[str, Check] = {
    **dict.fromkeys(("model", "variants", "device", "about"), text),
    **dict.fromkeys(("batch", "steps", "frames", "rounds", "warmup"), integer(1)),
    "threads": optional(integer(1)),
    "size": lambda name, size: parse_size(size),
    "dtype": one_of(DTYPE_CHOICES),
    "attention": attention_choice,
    "compile": switch,
    "speedup": check_speedup,
    "ratio": number("a fraction of the tokens, from 0 to 1", lambda ratio: 0 <= ratio <= 1),
    "guidance": check_guidance,
    "seed": integer(0),
}
_axis = partial(option, "Axes")
_shared = partial(option, "Settings")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The axes of a benchmark, which are tuples, and the settings that all its cells share.

    Every combination of the values on the axes is measured. ``about`` is a description of the grid, and has
    no effect.
    """

    model: Annotated[
        tuple[str, ...], _axis("Bundled model, folder, hub id, or geometry:NAME for random weights.")
    ] = ("geometry:sd15",)
    size: Annotated[
        tuple[str, ...], _axis("WIDTHxHEIGHT, or N for a square, in pixels. Default: each model's own.")
    ] = ()
    batch: Annotated[tuple[int, ...], _axis("Images per call.")] = (1,)
    dtype: Annotated[tuple[str, ...], _axis(f"{', '.join(DTYPE_CHOICES)}.")] = ("auto",)
    attention: Annotated[tuple[str, ...], _axis(ATTENTION_HELP)] = ("sdpa",)
    variants: Annotated[
        tuple[str, ...],
        _axis(
            f"{', '.join(CHOICES)}; or one of them with settings of ToMeConfig, such as toma:ratio=0.6 or "
            "tome:proportional,scope=block,reuse.every=2. tomesd is the package of that name.",
            "--variant",
        ),
    ] = ("auto", "tome", "tomesd")
    speedup: Annotated[tuple[float, ...], _axis("Speed-up that auto should reach.")] = (DEFAULT_SPEEDUP,)
    ratio: Annotated[tuple[float, ...], _axis("Fraction of tokens that the other methods remove.")] = (0.5,)
    compile: tuple[bool, ...] = (False,)
    steps: Annotated[int, _shared("Denoising steps.")] = 25
    guidance: Annotated[
        float | None,
        _shared("Guidance scale; above 1, the denoiser's batch is doubled. Default: the model's own."),
    ] = None
    frames: Annotated[int, _shared("Frames of a video model of the Wan family.")] = 81
    seed: Annotated[int, _shared("Seed of weights, inputs and noise.")] = 0
    device: Annotated[str, _shared("auto, cpu, cuda, cuda:1 or mps.")] = "auto"
    threads: Annotated[int | None, _shared("CPU threads. Default: torch's choice.")] = None
    rounds: Annotated[int, _shared("Timed calls of each cell.")] = 5
    warmup: Annotated[int, _shared("Untimed calls before them.")] = 1
    about: str = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_axis = isinstance(field.default, tuple)
            for item in value if is_axis else (value,):
                _CHECKS[field.name](field.name, item)
            if is_axis and not value and field.name != "size":
                raise ConfigError(f"{field.name}: expected at least one value, got none")
        self.specs()

    def specs(self) -> list[Variant]:
        """Return the variants. A variant without its own ratio or speed-up appears once for each value."""
        specs: list[Variant] = []
        for wanted in self.variants:
            name = wanted.partition(":")[0]
            if name in VARIANTS and name not in CHOICES:
                raise ConfigError(
                    f"variant: expected some of {', '.join(CHOICES)}, got {name!r}, which follows the steps "
                    "of a pipeline; tokenmerge evaluate times it"
                )
            specs += parse_variant(wanted, self.ratio, self.speedup)
        return list(dict.fromkeys(specs))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str) -> BenchOptions:
        """Make options from the values of a TOML file. A single value counts as a list of one.

        ``where`` says where the values come from, for error messages.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - set(fields))
        if unknown:
            raise ConfigError(
                f"{where}: unknown setting {', '.join(map(repr, unknown))}; use some of {', '.join(fields)}"
            )
        arguments: dict[str, Any] = {}
        for name, value in values.items():
            if isinstance(fields[name].default, tuple):
                items = value if isinstance(value, list | tuple) else [value]
                arguments[name] = tuple(map(str, items)) if name == "size" else tuple(items)
            else:
                arguments[name] = value
        try:
            return cls(**arguments)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error


def read_grid(path: Path) -> dict[str, Any]:
    """Read and check the values of a grid file."""
    if path.suffix.lower() != ".toml":
        raise ConfigError(f"grid: expected a file ending in .toml, got {path}; write the same values as TOML")
    content = read_text(path, "grid", "give a TOML file with axes and settings")
    parser = toml_parser()
    try:
        values: dict[str, Any] = parser.loads(content)
    except (parser.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"grid: {path} is not valid TOML: {error}") from error
    BenchOptions.from_dict(values, str(path))
    return values


# The attention of the dense run that all speed-ups are relative to.
FUSED = "sdpa"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """The conditions that cells share when their calls are interleaved. Width and height are in pixels."""

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

    def __str__(self) -> str:
        return f"{self.spec.label}, {self.attention}{', compiled' if self.compile else ''}"


def plan_cells(options: BenchOptions, device: torch.device) -> tuple[list[Setting], tuple[Cell, ...]]:
    """Return the settings of a benchmark, and the cells that are measured at each of them.

    There is always one dense cell for each requested attention, and one with fused attention. This separates
    the gain of fused attention from the gain of merging. Each model is loaded once for each dtype.
    """
    dtypes = dict.fromkeys(dtype_name(resolve_dtype(dtype, device)) for dtype in options.dtype)
    settings = []
    for model in dict.fromkeys(options.model):
        own_size, multiple, has_frames = find_facts(model)
        sizes = list(map(parse_size, options.size)) or ([] if own_size is None else [own_size])
        if not sizes:
            raise ConfigError(f"size: {model} has no default size; give --size")
        for size in sizes:
            check_size(size, multiple)
        for dtype, (width, height), batch in product(dtypes, sizes, options.batch):
            shared = ("steps", "guidance", "seed", "rounds", "warmup")
            same = {name: getattr(options, name) for name in shared}
            place = {"width": width, "height": height, "frames": options.frames if has_frames else None}
            settings.append(Setting(model=model, **place, batch=batch, dtype=dtype, **same))
    cells = []
    applied = [spec for spec in options.specs() if spec.name != DENSE]
    for compiled in dict.fromkeys(options.compile):
        for attention in dict.fromkeys((FUSED, *options.attention)):
            cells.append(Cell(Variant(DENSE), attention, compiled))
        for attention, spec in product(dict.fromkeys(options.attention), applied):
            cells.append(Cell(spec, attention, compiled))
    return settings, tuple(cells)
