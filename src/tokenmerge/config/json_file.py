"""Settings in a JSON file.

The file holds ``{"version": 1, "settings": {...}}``, with the settings as :meth:`ToMeConfig.to_dict` returns
them. A file of ``tokenmerge tune`` also says under ``"tuned"`` what they were found for.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from pathlib import Path
from typing import Any

from tokenmerge.config.checks import refuse
from tokenmerge.config.found_for import FoundFor
from tokenmerge.config.tome import ToMeConfig
from tokenmerge.errors import ConfigError

VERSION = 1
_LARGEST = 16 * 2**20  # bytes; files of settings have some thousands
_LONGEST_NAME = 200  # characters of a name in a message


@dataclasses.dataclass(frozen=True)
class SavedSettings:
    """What a file of settings holds.

    Args:
        config: the settings.
        found_for: what ``tokenmerge tune`` found them for. None: they were saved, or written by hand.
    """

    config: ToMeConfig
    found_for: FoundFor | None = None


def save_config(config: ToMeConfig, path: str | Path) -> None:
    """Write settings to a file, which :func:`load_config` reads.

    Args:
        config: the settings.
        path: of the file; one that exists is replaced.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = json.dumps({"version": VERSION, "settings": config.to_dict()}, indent=2) + "\n"
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise OSError("not a regular file")
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:  # a ValueError: the path holds a null character
        raise ConfigError(f"{path}: cannot write settings ({error}); choose another path") from error


def load_config(path: str | Path) -> ToMeConfig:
    """Read settings from a file.

    Args:
        path: of a file that :func:`save_config` or ``tokenmerge tune`` wrote, or that was written by hand;
            settings that it does not name have their defaults.

    Raises:
        ConfigError: the file cannot be read, has other content, or has a setting that is unknown or out of
            range; the message names the file and the setting.
    """
    return load_settings(path).config


def load_settings(path: str | Path) -> SavedSettings:
    """Read settings from a file, and what they were found for.

    Args:
        path: as for :func:`load_config`.

    Raises:
        ConfigError: as for :func:`load_config`.
    """
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise OSError("not a regular file")
        with Path(path).open("rb") as file:
            text = file.read(_LARGEST + 1)
        if len(text) > _LARGEST:
            raise OSError(f"it has more than {_LARGEST:,} bytes")
        return content(json.loads(text, object_pairs_hook=unique_keys))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{path}: cannot read settings ({reason}); pass a JSON file that tokenmerge tune or save_config "
            "wrote"
        ) from error


def content(found: Any) -> SavedSettings:
    """Return the settings in the content of a JSON file.

    Raises:
        ConfigError: the content has another form, or a setting is unknown or out of range.
    """
    if not isinstance(found, dict) or found.keys() - {"tuned"} != {"version", "settings"}:
        keys = list(found) if isinstance(found, dict) else found
        refuse("content", 'an object with the keys "version" and "settings"', keys)
    if found["version"] != VERSION or isinstance(found["version"], bool):
        refuse("version", f"{VERSION}, the one that this release reads", found["version"])
    if not isinstance(found["settings"], dict):
        refuse("settings", 'settings by name, such as {"ratio": 0.5}', found["settings"])
    config = ToMeConfig.from_dict(found["settings"])
    return SavedSettings(config, _found_for(found["tuned"]) if "tuned" in found else None)


def _found_for(tuned: Any) -> FoundFor:
    given = tuned.get("found_for") if isinstance(tuned, dict) else None
    names = [field.name for field in dataclasses.fields(FoundFor)]
    if not isinstance(given, dict) or sorted(given) != sorted(names):
        refuse("tuned.found_for", f"an object with the keys {', '.join(names)}", given)
    return FoundFor(**given)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object from its pairs; a repeated key is an error."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, times),) = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ConfigError(f"{twice[:_LONGEST_NAME]}: expected once, got it {times} times")
    return found
