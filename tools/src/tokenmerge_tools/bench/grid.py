"""The options of ``tokenmerge bench``, from flags, TOML or YAML files, and presets."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from tokenmerge.config.checks import Check, integer, number, one_of, optional, switch, text
from tokenmerge.errors import ConfigError
from tokenmerge_tools.files import read_bytes
from tokenmerge_tools.pipelines.settings import DTYPE_CHOICES, attention_choice, check_guidance, parse_size
from tokenmerge_tools.variants.variant import ORACLE, VARIANTS, Variant, oracle_of, parse_variant

SCOPES = ("denoiser", "pipeline")
_FRACTION = number("a fraction of the tokens, from 0 to 1", lambda ratio: 0 <= ratio <= 1)
_PRESETS = resources.files("tokenmerge_tools.bench") / "presets"


def _one(check: Check, default: Any) -> Any:
    """Return a setting that all cells share."""
    return dataclasses.field(default=default, metadata={"check": check})


def _axis(check: Check, *default: Any) -> Any:
    """Return an axis. Every combination of the values of all axes is measured."""
    return _one(check, default)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The axes of a benchmark, and the settings that all its cells share.

    Fields that :class:`tokenmerge_tools.pipelines.options.GenerateOptions` also has mean the same there.
    Every combination of the values on these axes is measured:

    Args:
        model: bundled models, folders, hub ids, or ``geometry:NAME``; at least one.
        size: ``WIDTHxHEIGHT`` or one number for a square, in pixels. Empty: each model's default size.
        batch: images per call, each ≥ 1.
        dtype: dtypes, named as in ``GenerateOptions``; at least one.
        attention: attention implementations, named as in ``GenerateOptions``; at least one.
        compile: whether the denoiser is compiled with ``torch.compile``.
        variants: variants to compare with dense, such as ``"tome"`` or ``"tome:ratio=0.75,merge_mlp"``.
        ratio: ratios for the variants that do not set their own.

    These settings hold for all cells:

    Args:
        max_downsample: deepest level that merges. None: the variant's default. A variant may set its own.
        scope: ``"denoiser"`` times one call of the denoiser, ``"pipeline"`` a whole run from prompt to image.
        guidance: above 1, the batch of the denoiser is doubled.
        frames: frames of a video model, ≥ 1.
        seed: seed of weights, inputs and noise, ≥ 0.
        threads: CPU threads, ≥ 1. None: torch's default.
        rounds: timed calls of each cell, ≥ 1. The calls of all cells of one setting are interleaved.
        warmup: untimed calls before them, ≥ 1. Compiled cells get at least three.
        about: a description of the grid, without effect.
    """

    model: tuple[str, ...] = _axis(text, "geometry:sd15")
    size: tuple[str, ...] = _axis(lambda name, size: parse_size(size))
    batch: tuple[int, ...] = _axis(integer(1), 1)
    dtype: tuple[str, ...] = _axis(one_of(DTYPE_CHOICES), "auto")
    attention: tuple[str, ...] = _axis(attention_choice, "sdpa")
    compile: tuple[bool, ...] = _axis(switch, False)
    variants: tuple[str, ...] = _axis(text, "auto", "tome", "tomesd", "fewer-steps")
    ratio: tuple[float, ...] = _axis(_FRACTION, 0.5)
    max_downsample: int | None = _one(optional(integer(1)), None)
    scope: str = _one(one_of(SCOPES), "denoiser")
    steps: int = _one(integer(1), 25)
    scheduler: str | None = _one(optional(text), None)
    guidance: float | None = _one(check_guidance, None)
    frames: int = _one(integer(1), 81)
    seed: int = _one(integer(0), 0)
    device: str = _one(text, "auto")
    threads: int | None = _one(optional(integer(1)), None)
    rounds: int = _one(integer(1), 5)
    warmup: int = _one(integer(1), 1)
    about: str = _one(text, "")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, is_axis = getattr(self, field.name), isinstance(field.default, tuple)
            for item in value if is_axis else (value,):
                field.metadata["check"](field.name, item)
            if is_axis and not value and field.name != "size":
                raise ConfigError(f"{field.name}: expected at least one value, got none")
        self.specs()

    def specs(self) -> list[Variant]:
        """Return the variants. A variant that takes a ratio but does not set one appears once for each ratio.

        A plain ``"oracle"`` stands for the oracle of each merging variant.
        """
        defaults: dict[str, Any] = {}
        if self.max_downsample is not None:
            defaults["max_downsample"] = self.max_downsample
        specs: list[Variant] = []
        for variant in self.variants:
            specs += parse_variant(variant, self.ratio, defaults)
        merging = [spec for spec in specs if VARIANTS[spec.name].is_faster]
        if ORACLE in self.variants and merging:
            oracles = [oracle for oracle in map(oracle_of, merging) if oracle is not None]
            plain = parse_variant(ORACLE, self.ratio, defaults)
            specs = [spec for spec in specs if spec not in plain] + oracles
        return list(dict.fromkeys(specs))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str) -> BenchOptions:
        """Make options from the values of a TOML or YAML file. A single value counts as a list of one.

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


def preset_names() -> tuple[str, ...]:
    """Return the names of the presets.

    >>> preset_names()
    ('diffusers-docs', 'paper', 'ppdiffusers')
    """
    names = (file.name for file in _PRESETS.iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def read_preset(name: str) -> dict[str, Any]:
    """Read the values of a preset."""
    if name not in preset_names():
        raise ConfigError(f"preset: expected one of {', '.join(preset_names())}, got {name!r}")
    return _toml((_PRESETS / f"{name}.toml").read_text(encoding="utf-8"), f"preset {name}")


def read_grid(path: Path) -> dict[str, Any]:
    """Read and check the values of a grid file. Its suffix tells whether it is TOML or YAML."""
    parsers = {".toml": _toml, ".yaml": _yaml, ".yml": _yaml}
    parse = parsers.get(path.suffix.lower())
    if parse is None:
        raise ConfigError(f"grid: expected a file ending in {', '.join(parsers)}, got {path}")
    content = read_bytes(path, "grid", "give a TOML or YAML file with axes and settings")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"grid: cannot read {path}: it is not UTF-8 text; save it as UTF-8") from error
    values = parse(text, str(path))
    BenchOptions.from_dict(values, str(path))
    return values


def _toml(text: str, where: str) -> dict[str, Any]:
    try:
        parser: Any = importlib.import_module("tomllib")
    except ModuleNotFoundError:  # Python 3.10
        parser = importlib.import_module("tomli")
    try:
        return parser.loads(text)
    except (parser.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"grid: {where} is not valid TOML: {error}") from error


def _yaml(text: str, where: str) -> dict[str, Any]:
    parser: Any = importlib.import_module("yaml")
    try:
        values = parser.safe_load(text)
    except (parser.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"grid: {where} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"grid: {where} should hold settings by name, such as `ratio: [0.5]`")
    return values
