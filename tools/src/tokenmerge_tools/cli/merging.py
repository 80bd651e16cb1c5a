"""The options for token merging, which all commands that merge share."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any

from tokenmerge.config import SavedSettings, load_settings
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
from tokenmerge_tools.pipelines.meta_model import load_sketch, solver_and_guidance
from tokenmerge_tools.pipelines.options import option
from tokenmerge_tools.pipelines.settings import parse_size, scheduler_class_name

_merging = functools.partial(option, "Merging")


def rule_instead(
    file: Path,
    model: str,
    size: str | tuple[int, int] | None,
    steps: int | None = None,
    scheduler: str | None = None,
    guidance: float | None = None,
) -> float | None:
    """Say if the settings in a file were found for another kind of generation.

    A scheduler or guidance of None is the model's own. The result is the speed-up of the default method,
    which then takes the place of a plan; None: the settings are used.
    """
    quiet_libraries("--settings")
    saved = _load(file)
    if saved.found_for is None:
        return None
    known = _of_model(model, parse_size(size) if isinstance(size, str) else size, scheduler, guidance)
    found = saved.found_for.differences(steps=steps, **known)
    if not found:
        return None
    terminal.say(f"note: {file}: {saved.found_for.warning(found, saved.speedup)}")
    return saved.speedup


def _of_model(
    model: str, size: tuple[int, int] | None, scheduler: str | None, guidance: float | None
) -> dict[str, Any]:
    """Return the facts of a generation to compare. Those that only a checkpoint has are left out."""
    source = find_model(model)
    solver = None if scheduler is None else scheduler_class_name(scheduler)
    if source.kind is SourceKind.CHECKPOINT:
        return {"solver": solver, "guidance": guidance}
    sketch = load_sketch(source)
    size = size or sketch.size
    own, default = solver_and_guidance(source)
    scale = default if guidance is None else guidance
    if scale is not None and (scale <= 1 or sketch.denoiser.config.get("guidance_embeds")):
        scale = 1.0
    return {
        "model": type(sketch.denoiser).__name__,
        "size": None if size is None else (size[1] // sketch.scale, size[0] // sketch.scale),
        "solver": solver or own,
        "guidance": None if default is None else scale,  # a pipeline that hides its guidance
    }


def merging(
    method: Annotated[
        str,
        _merging(f"{', '.join(METHODS)}. auto is the default method. The options below change its settings."),
    ] = MethodSpec.method,
    speedup: Annotated[
        float | None,
        _merging(
            "Speed-up that auto should reach: operations of the unchanged denoiser, divided by those that "
            "run. Default: 2.",
            parser="number",
        ),
    ] = None,
    ratio: Annotated[
        float | None,
        _merging(
            "Fraction of tokens to remove, from 0 to 1 - 1/(sx*sy), for all methods but auto. Without "
            "--method, tokens merge before attention in every step, and nothing is skipped.",
            parser="number",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        _merging(
            "NAME=VALUE: any setting of ToMeConfig, such as scope=block, reuse.every=2 or seed=none. Rules "
            'are JSON: rules=[{"level": 2, "ratio": 0.25}]. '
            "May be repeated.",
            "--set",
        ),
    ] = None,
    settings_file: Annotated[
        Path | None,
        _merging("File of settings, such as the one that tokenmerge tune wrote.", "--settings"),
    ] = None,
) -> MethodSpec:
    """Make a method with changed settings from the options."""
    changes = {SPEEDUP: speedup, "ratio": ratio}
    changes = {name: value for name, value in changes.items() if value is not None}
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
    return _load(path).config.changed()


def variant_of_file(path: Path, speedup: float | None = None) -> str:
    """Return the settings in a file as a variant, such as ``"tome:ratio=0.5,proportional=True"``.

    ``speedup`` is that of the default method in place of the settings, see :func:`rule_instead`.
    """
    if speedup is not None:
        return f"{AUTO}:{SPEEDUP}={speedup:g}"
    return "tome:" + ",".join(f"{name}={as_plain(value)}" for name, value in changes_of_file(path).items())


def _load(path: Path) -> SavedSettings:
    try:
        return load_settings(path)
    except ConfigError as error:
        raise ConfigError(f"settings: {error}") from error
