"""Reads the settings file of the option ``--settings``, as changes to a method or as a variant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenmerge.config import ToMeConfig, load_settings
from tokenmerge.errors import ConfigError
from tokenmerge_tools.method_spec import as_plain
from tokenmerge_tools.pipelines.loading import SourceKind, find_model
from tokenmerge_tools.pipelines.meta_model import load_sketch


def changes_of_file(path: Path) -> dict[str, Any]:
    """Return the ratio in a file, and its settings that differ from the defaults."""
    return _load(path).changed()


def variant_of_file(path: Path) -> str:
    """Return the settings in a file as a variant, such as ``"tome:ratio=0.5,proportional=True"``."""
    return "tome:" + ",".join(f"{name}={as_plain(value)}" for name, value in changes_of_file(path).items())


def differences(
    path: Path, model: str, size: tuple[int, int] | None = None, steps: int | None = None
) -> str | None:
    """Warn if the settings in a file were found for another model, size or number of steps.

    The class and the size of a single checkpoint are not compared.
    """
    found_for = load_settings(path).found_for
    if found_for is None:
        return None
    source = find_model(model)
    name, latent = None, None
    if source.kind is not SourceKind.CHECKPOINT:
        sketch = load_sketch(source)
        name = type(sketch.denoiser).__name__
        size = size or sketch.size
        latent = None if size is None else (size[1] // sketch.scale, size[0] // sketch.scale)
    found = found_for.differences(name, latent, steps)
    return f"{path}: {found_for.warning(found)}" if found else None


def _load(path: Path) -> ToMeConfig:
    try:
        return load_settings(path).config
    except ConfigError as error:
        raise ConfigError(f"settings: {error}") from error
