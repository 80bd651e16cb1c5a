"""Options of ``tokenmerge generate`` from the parameters of a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tokenmerge.errors import ConfigError
from tokenmerge_tools import demo
from tokenmerge_tools.generate.parameters import read_picture
from tokenmerge_tools.method_spec import MethodSpec
from tokenmerge_tools.pipelines.settings import scheduler_class_name

# The options that set how to merge, apart from single settings.
_METHODS = {"method", "settings_file"}


def options_like(
    path: Path, options: Mapping[str, Any], given: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Fill in options from the parameters of a picture. Return them, and notes on what could not be taken.

    The model is taken only if it is bundled, so that a picture from elsewhere cannot load a model. Options
    ``given`` by the user are kept, and single settings of token merging replace those of the picture.
    """
    picture, notes = read_picture(path), []
    if "model" not in given and picture.model is not None and picture.model not in demo.NAMES:
        raise ConfigError(
            f"like: {path} was made with the model {picture.model!r}; give this or another model with --model"
        )
    if "scheduler" not in given and picture.scheduler is not None:
        try:
            scheduler_class_name(picture.scheduler)
        except ConfigError:
            notes.append(f"{path}: the sampler {picture.scheduler!r} is unknown; set one with --scheduler")
            picture = dataclasses.replace(picture, scheduler=None)
    if picture.controlnet is not None and "controlnet" not in given:
        notes.append(
            f"{path} was made with the ControlNet {picture.controlnet!r}; give it with --controlnet, and its "
            "picture with --control"
        )
    names = ("prompt", "seed", "steps", "size", "negative_prompt", "guidance", "scheduler", "model")
    found = {name: value for name in names if (value := getattr(picture, name)) is not None}
    taken = {**options, **{name: value for name, value in found.items() if name not in given}}
    if picture.merging is None:
        notes.append(f"{path}: it has no settings of token merging; those of the options are used")
    elif not _METHODS & set(given):
        own = options["merging"].changes
        also = f" and {', '.join(own)}" if own else ""
        taken["merging"] = MethodSpec("tome", {**picture.merging.changed(), **own}, f"{path}{also}")
    return taken, notes
