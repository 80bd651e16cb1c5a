"""The options for token merging, which all commands that merge share."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from tokenmerge.config import Tuned, load_settings
from tokenmerge.default_method import default_guidance
from tokenmerge.errors import ConfigError
from tokenmerge_tools.cli import terminal
from tokenmerge_tools.method_spec import AUTO, METHODS, SPEEDUP, MethodSpec, merging_alone, read_setting
from tokenmerge_tools.pipelines.loading import SourceKind, find_model, quiet_libraries
from tokenmerge_tools.pipelines.meta_model import load_sketch
from tokenmerge_tools.pipelines.options import option
from tokenmerge_tools.pipelines.settings import parse_size, scheduler_class_name

_merging = functools.partial(option, "Merging")


def spec_of_file(
    file: Path,
    changes: Mapping[str, Any],
    model: str,
    size: str | tuple[int, int] | None = None,
    steps: int | None = None,
    scheduler: str | None = None,
    guidance: float | None = None,
) -> MethodSpec:
    """Return the method that a file of settings describes, with changes.

    A file of ``tokenmerge tune`` describes the default method. If it was measured on another kind of
    generation, a note says so. If the scheduler or the guidance is None, it is the model's own.
    """
    quiet_libraries("--settings")
    try:
        saved = load_settings(file)
    except ConfigError as error:
        raise ConfigError(f"settings: {error}") from error
    also = f" and {', '.join(changes)}" if changes else ""
    if isinstance(saved, Tuned):
        known = _of_model(model, parse_size(size) if isinstance(size, str) else size, scheduler, guidance)
        if found := saved.found_for.differences(steps=steps, **known):
            terminal.say(f"note: {file}: {saved.found_for.warning(found)}")
        return MethodSpec(AUTO, {SPEEDUP: saved.speedup, **changes}, f"{file}{also}")
    return MethodSpec("tome", {**saved.changed(), **changes}, f"{file}{also}")


def _of_model(
    model: str, size: tuple[int, int] | None, scheduler: str | None, guidance: float | None
) -> dict[str, Any]:
    """Return the facts of a generation that the configs of its model tell. A checkpoint tells only two."""
    source = find_model(model)
    name = None if scheduler is None else scheduler_class_name(scheduler)
    if source.kind is SourceKind.CHECKPOINT:
        return {"scheduler": name, "guidance": guidance}
    sketch = load_sketch(source)
    size = size or sketch.size
    pipeline = sketch.pipeline
    default_scheduler = getattr(pipeline, "scheduler", None)
    guides = hasattr(type(pipeline), "do_classifier_free_guidance")  # otherwise its guidance is unknown
    scale = default_guidance(pipeline) if guidance is None else guidance
    if scale is not None and (scale <= 1 or sketch.denoiser.config.get("guidance_embeds")):
        scale = 1.0
    return {
        "model": type(sketch.denoiser).__name__,
        "size": None if size is None else (size[1] // sketch.scale, size[0] // sketch.scale),
        "scheduler": name or (default_scheduler and type(default_scheduler).__name__),
        "guidance": scale if guides else None,
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
            "run. Default: 2, if there is no --ratio. An export has none.",
            parser="number",
        ),
    ] = None,
    ratio: Annotated[
        float | None,
        _merging(
            "Fraction of tokens to remove, from 0 to 0.75, for all methods but auto. Without "
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
    *,
    about: Mapping[str, Any],
) -> MethodSpec:
    """Make a method with changed settings from the options.

    ``about`` has the model and the generation as :func:`spec_of_file` takes them. It is not an option of the
    command.
    """
    if ratio is not None and ratio >= 1:
        raise ConfigError(f"ratio: expected 0 to 0.75, got {ratio:g}; for a speed, give --speedup {ratio:g}")
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
    return spec_of_file(settings_file, changes, **about)
