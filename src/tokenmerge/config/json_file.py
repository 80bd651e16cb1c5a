"""Settings in a JSON file.

The file holds ``{"version": 1, "settings": {...}}``, with the settings as :meth:`ToMeConfig.to_dict` returns
them. ``tokenmerge tune`` writes ``{"version": 2, "speedup": 2.0, "plan": {...}, "for": {...}}``: the wanted
speed-up, settings that were found for it, and as fields of :class:`FoundFor` what they were found for. Before
November 2026 it wrote version 1, and under ``"tuned"`` what the settings were found for.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from pathlib import Path
from typing import Any

from tokenmerge.config.checks import number, refuse
from tokenmerge.config.found_for import FoundFor
from tokenmerge.config.tome import ToMeConfig
from tokenmerge.errors import ConfigError

VERSION, VERSION_OF_PLANS = 1, 2
_LARGEST = 16 * 2**20  # bytes; files of settings have some thousands
_LONGEST_NAME = 200  # characters of a name in a message
_SPEEDUP = number("a number ≥ 1, such as 2.0", lambda value: value >= 1)


@dataclasses.dataclass(frozen=True)
class SavedSettings:
    """What a file of settings holds.

    Args:
        config: the settings.
        found_for: what ``tokenmerge tune`` found them for. None: they were saved, or written by hand.
        speedup: the wanted speed-up that they were found for. In other generations than those of
            ``found_for``, the default method reaches it. None: the settings hold for all generations.
    """

    config: ToMeConfig
    found_for: FoundFor | None = None
    speedup: float | None = None


def plan_content(saved: SavedSettings) -> dict[str, Any]:
    """Return the content of a file of ``tokenmerge tune``. The speed-up and the signature are given."""
    assert saved.found_for is not None
    return {
        "version": VERSION_OF_PLANS,
        "speedup": saved.speedup,
        "plan": saved.config.changed(),
        "for": dataclasses.asdict(saved.found_for),
    }


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
    if isinstance(found, dict) and found.keys() - {"measured"} == {"version", "speedup", "plan", "for"}:
        _check_version(found, VERSION_OF_PLANS)
        speedup = _SPEEDUP("speedup", found["speedup"])
        return SavedSettings(_settings(found, "plan"), _found_for(found["for"], "for"), speedup)
    if not isinstance(found, dict) or found.keys() - {"tuned"} != {"version", "settings"}:
        keys = list(found) if isinstance(found, dict) else found
        refuse(
            "content",
            'an object with the keys "version" and "settings", or "version", "speedup", "plan" and "for"',
            keys,
        )
    _check_version(found, VERSION)
    config = _settings(found, "settings")
    if "tuned" not in found:
        return SavedSettings(config)
    given = found["tuned"].get("found_for") if isinstance(found["tuned"], dict) else None
    return SavedSettings(config, _found_for(given, "tuned.found_for"))


def _check_version(found: dict[str, Any], version: int) -> None:
    if found["version"] != version or isinstance(found["version"], bool):
        refuse("version", f"{version}, the one that this release reads", found["version"])


def _settings(found: dict[str, Any], key: str) -> ToMeConfig:
    if not isinstance(found[key], dict):
        refuse(key, 'settings by name, such as {"ratio": 0.5}', found[key])
    return ToMeConfig.from_dict(found[key])


def _found_for(given: Any, key: str) -> FoundFor:
    fields = dataclasses.fields(FoundFor)
    names = {field.name for field in fields}
    needed = {field.name for field in fields if field.default is dataclasses.MISSING}
    if not isinstance(given, dict) or not needed <= given.keys() <= names:
        refuse(key, f"an object with the keys {', '.join(field.name for field in fields)}", given)
    return FoundFor(**given)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object from its pairs; a repeated key is an error."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, times),) = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ConfigError(f"{twice[:_LONGEST_NAME]}: expected once, got it {times} times")
    return found
