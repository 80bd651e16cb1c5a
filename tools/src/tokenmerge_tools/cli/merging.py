"""The options for token merging, which all commands that merge share."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any

from tokenmerge.config import ToMeConfig, load_settings
from tokenmerge.errors import ConfigError
from tokenmerge_tools.cli import terminal
from tokenmerge_tools.method_spec import (
    AUTO,
    METHODS,
    SPEEDUP,
    MethodSpec,
    as_plain,
    merging_alone,
    read_setting,
)
from tokenmerge_tools.pipelines.loading import SourceKind, find_model, quiet_libraries
from tokenmerge_tools.pipelines.meta_model import load_sketch
from tokenmerge_tools.pipelines.options import option
from tokenmerge_tools.pipelines.settings import parse_size

_merging = functools.partial(option, "Merging")
SettingsFile = Annotated[
    Path | None,
    _merging("File of settings, such as the one that tokenmerge tune wrote.", "--settings"),
]


def warn_of_differences(
    file: Path, model: str, size: str | tuple[int, int] | None, steps: int | None
) -> None:
    """Say if the settings in a file were found for another model, size or number of steps."""
    quiet_libraries("--settings")
    if warning := differences(file, model, parse_size(size) if isinstance(size, str) else size, steps):
        terminal.say(f"note: {warning}")


def merging(
    method: Annotated[
        str, _merging(f"{', '.join(METHODS)}. The options below override the method's settings.")
    ] = MethodSpec.method,
    speedup: Annotated[
        float | None,
        _merging(
            "Wanted speed-up of the default method (auto), by counted operations. Default: 2.",
            parser="number",
        ),
    ] = None,
    ratio: Annotated[
        float | None,
        _merging(
            "Fraction of tokens that the other methods remove, from 0 to 1 - 1/(sx*sy). Without --method, "
            "tokens merge before attention in every step, and nothing is skipped.",
            parser="number",
        ),
    ] = None,
    max_downsample: Annotated[
        int | None,
        _merging("Deepest level that merges: 1, 2, 4 or 8. Default: the method's own.", parser="integer"),
    ] = None,
    sx: Annotated[
        int | None,
        _merging("Width in tokens of the cells with one destination each.", "--sx", parser="integer"),
    ] = None,
    sy: Annotated[int | None, _merging("Height in tokens of these cells.", "--sy", parser="integer")] = None,
    merge_attn: Annotated[
        bool | None, _merging("Merge around self-attention.", "--merge-attn/--no-merge-attn")
    ] = None,
    merge_crossattn: Annotated[
        bool | None, _merging("Merge around cross-attention too.", "--merge-crossattn/--no-merge-crossattn")
    ] = None,
    merge_mlp: Annotated[
        bool | None, _merging("Merge around the feed-forward layer too.", "--merge-mlp/--no-merge-mlp")
    ] = None,
    settings: Annotated[
        list[str] | None,
        _merging(
            "NAME=VALUE: any setting of ToMeConfig, such as scope=block, reuse.every=2 or seed=none; rules "
            'are JSON: rules=[{"level": 2, "ratio": 0.25}]. '
            "May be repeated.",
            "--set",
        ),
    ] = None,
    settings_file: SettingsFile = None,
) -> MethodSpec:
    """Make a method with changed settings from the options."""
    given = dict(locals())  # every option by its name
    del given["method"], given["settings"], given["settings_file"]
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    for text in settings or ():
        try:
            name, value = read_setting(text)
        except ConfigError as error:
            raise ConfigError(f"set: {error}") from error
        if name in changes:
            raise ConfigError(f"set: {name} is given twice, as {changes[name]!r} and as {value!r}")
        changes[name] = value
    if settings_file is None:
        if method == AUTO and "ratio" in changes and SPEEDUP not in changes:
            return merging_alone(changes.pop("ratio"), changes)
        return MethodSpec(method, changes)
    if method != MethodSpec.method:
        raise ConfigError(f"settings: {settings_file} sets everything; leave out --method {method}")
    also = f" and {', '.join(changes)}" if changes else ""
    return MethodSpec("tome", {**changes_of_file(settings_file), **changes}, f"{settings_file}{also}")


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
