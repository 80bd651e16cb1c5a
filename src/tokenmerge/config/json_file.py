"""Settings in a JSON file, and in the parameters of an image.

A file holds ``{"version": 1, "settings": {...}}``, with the settings as :meth:`ToMeConfig.to_dict` returns
them. ``tokenmerge tune`` writes ``{"version": 3, "speedup": 2.0, "for": {...}, "estimates": {...}}``: what
:class:`Tuned` holds.

Parameters hold one line: ``Token merging: tome 0.5, {"version": 1, "settings": {"ratio": 0.5, "planner":
"tiled"}}``. It has the name of the method, the ratio or speed-up that was asked for, and the content of a
file, without the settings that have their default values.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tokenmerge.config.checks import refuse
from tokenmerge.config.origin import is_default
from tokenmerge.config.tome import ToMeConfig
from tokenmerge.config.tuned import KEYS, KEYS_OF_A_PLAN, Tuned, refuse_a_plan
from tokenmerge.errors import ConfigError, short_repr

VERSION = 1
NAME = "Token merging"


def save_config(config: ToMeConfig, path: str | Path) -> None:
    """Write settings to a file, which :func:`load_config` reads. A file that exists is replaced.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = json.dumps({"version": VERSION, "settings": config.to_dict()}, indent=2) + "\n"
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:  # it is a ValueError if the path holds a null character
        raise ConfigError(f"{path}: cannot write settings ({error}); choose another path") from error


def load_config(path: str | Path) -> ToMeConfig:
    """Read settings from a file.

    Args:
        path: of a file that :func:`save_config` wrote, or that was written by hand; settings that it does not
            name have their defaults.

    Raises:
        ConfigError: the file cannot be read, has other content, or has a setting that is unknown or out of
            range; the message names the file and the setting.
    """
    found = load_settings(path)
    if isinstance(found, Tuned):
        raise ConfigError(
            f"{path}: tokenmerge tune wrote it, and it holds a speed in place of settings; write "
            f"apply_token_merging(pipe, {str(path)!r})"
        )
    return found


def load_settings(path: str | Path) -> ToMeConfig | Tuned:
    """Read settings from a file as :func:`load_config` does, or what ``tokenmerge tune`` wrote."""
    try:
        return content(json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=unique_keys))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{path}: cannot read settings ({reason}); pass a JSON file of tokenmerge tune or save_config"
        ) from error


def to_metadata(config: ToMeConfig, method: str = "") -> str:
    """Return the line for some settings. Without the name of a ``method``, the line has the word "ratio".

    >>> to_metadata(ToMeConfig(ratio=0.4, max_downsample=2))
    'Token merging: ratio 0.4, {"version": 1, "settings": {"ratio": 0.4, "max_downsample": 2}}'
    """
    # The first brace in the line begins the settings, so the name has none, and no line break either.
    words = " ".join(method.split("{")).split()
    name = " ".join(words) or "ratio"
    asked = name if is_default(method) else f"{name} {config.ratio:g}"
    settings = json.dumps({"version": VERSION, "settings": config.changed()})
    return f"{NAME}: {asked}, {settings}"


def read_metadata(text: str) -> ToMeConfig:
    """Return the settings in the parameters of an image.

    Args:
        text: a line of :meth:`tokenmerge.Patch.metadata`, or a text that contains one. Its value may be in
            double quotes, as web UIs write values with commas.

    Raises:
        ConfigError: there is no such line, or a setting in it is unknown or out of range.

    >>> read_metadata(to_metadata(ToMeConfig(ratio=0.4), "speedup=2"))
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
        settings = content(found)
    except ConfigError as error:
        raise ConfigError(f"metadata: {error}") from error
    if isinstance(settings, Tuned):
        refuse("metadata", f"settings after {NAME}: …", found)
    return settings


def content(found: Any) -> ToMeConfig | Tuned:
    """Return the settings in the content of a JSON file, or what ``tokenmerge tune`` wrote.

    Raises:
        ConfigError: the content is not that of a file of settings, or a setting is out of range.
    """
    keys = found.keys() - {"measured"} if isinstance(found, dict) else set()
    if keys == KEYS_OF_A_PLAN:
        refuse_a_plan(found)
    if keys == KEYS:
        return Tuned.of(found)
    if not isinstance(found, dict) or found.keys() != {"version", "settings"}:
        wanted = '"version" and "settings", or "version", "speedup", "for" and "estimates"'
        got = list(found) if isinstance(found, dict) else found
        refuse("content", f"an object with the keys {wanted}", got)
    if found["version"] != VERSION or isinstance(found["version"], bool):
        refuse("version", f"{VERSION}, the one that this release reads", found["version"])
    if not isinstance(found["settings"], dict):
        refuse("settings", 'settings by name, such as {"ratio": 0.5}', found["settings"])
    return ToMeConfig.from_dict(found["settings"])


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object from its pairs.

    Raises:
        ConfigError: a key is there twice.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, times),) = Counter(name for name, _ in pairs).most_common(1)
        raise ConfigError(f"{short_repr(twice)}: expected once, got it {times} times")
    return found
