"""Settings in the parameters of a picture: one line that a person and a program can read.

``Token merging: tome 0.5, {"version": 1, "settings": {"ratio": 0.5, "planner": "tiled"}}``: the name of the
method, the ratio or speed-up that was asked for, and the content of a file of settings
(:mod:`tokenmerge.config.json_file`), without those that have their default values.
"""

from __future__ import annotations

import json

from tokenmerge.config.checks import refuse
from tokenmerge.config.json_file import VERSION, content, unique_keys
from tokenmerge.config.origin import is_default
from tokenmerge.config.tome import ToMeConfig
from tokenmerge.errors import ConfigError

NAME = "Token merging"


def to_metadata(config: ToMeConfig, method: str = "") -> str:
    """Return the line for some settings. Without the name of a ``method``, the line has the word "ratio".

    >>> to_metadata(ToMeConfig(ratio=0.4, max_downsample=2))
    'Token merging: ratio 0.4, {"version": 1, "settings": {"ratio": 0.4, "max_downsample": 2}}'
    """
    called = " ".join(method.replace("{", " ").split()) or "ratio"  # the first brace begins the settings
    asked = called if is_default(method) else f"{called} {config.ratio:g}"
    settings = json.dumps({"version": VERSION, "settings": config.changed()})
    return f"{NAME}: {asked}, {settings}"


def read_metadata(text: str) -> ToMeConfig:
    """Return the settings in the parameters of a picture.

    Args:
        text: a line of :meth:`tokenmerge.Patch.metadata`, or a text that contains one. Its value may be in
            double quotes, as web UIs write values with commas.

    Raises:
        ConfigError: there is no such line, or a setting in it is unknown or out of range.

    >>> read_metadata(to_metadata(ToMeConfig(ratio=0.4), "speed-up 2"))
    ToMeConfig(ratio=0.4)
    """
    decoder = json.JSONDecoder(object_pairs_hook=unique_keys)
    value = text.rpartition(f"{NAME}: ")[2] if isinstance(text, str) else ""
    try:
        if value.startswith('"'):
            value, _ = decoder.raw_decode(value)
        found, _ = decoder.raw_decode(value, value.index("{"))
    except (ValueError, RecursionError):
        refuse("metadata", f"a text with a line of patch.metadata(), {NAME}: …", text)
    try:
        return content(found).config
    except ConfigError as error:
        raise ConfigError(f"metadata: {error}") from error
