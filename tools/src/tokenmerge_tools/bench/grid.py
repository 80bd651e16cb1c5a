"""Reads axes and settings from TOML and YAML files and from the presets of the package."""

from __future__ import annotations

import importlib
from importlib import resources
from pathlib import Path
from typing import Any

from tokenmerge.errors import ConfigError
from tokenmerge_tools.bench.options import BenchOptions
from tokenmerge_tools.files import read_bytes

_PRESETS = resources.files("tokenmerge_tools.bench") / "presets"


def preset_names() -> tuple[str, ...]:
    """Names of the presets.

    >>> preset_names()
    ('diffusers-docs', 'paper', 'ppdiffusers')
    """
    names = (file.name for file in _PRESETS.iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def read_preset(name: str) -> dict[str, Any]:
    """Read the values of a preset.

    Raises:
        ConfigError: the preset does not exist.
    """
    if name not in preset_names():
        raise ConfigError(f"preset: expected one of {', '.join(preset_names())}, got {name!r}")
    return _toml((_PRESETS / f"{name}.toml").read_text(encoding="utf-8"), f"preset {name}")


def read_grid(path: Path) -> dict[str, Any]:
    """Read and check the values of a grid file. Its suffix tells whether it is TOML or YAML.

    Raises:
        ConfigError: the file cannot be read or parsed, or does not describe a grid.
    """
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
