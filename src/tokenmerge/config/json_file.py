"""Settings in a JSON file, and in the parameters of an image.

A file holds ``{"version": 1, "settings": {...}}``, with the settings as :meth:`ToMeConfig.to_dict` returns
them. ``tokenmerge tune`` writes ``{"version": 2, "speedup": 2.0, "plan": {...}, "for": {...}}``: the wanted
speed-up, settings that were found for it, and as fields of :class:`FoundFor` what they were found for.

Parameters hold one line: ``Token merging: tome 0.5, {"version": 1, "settings": {"ratio": 0.5, "planner":
"tiled"}}``. It has the name of the method, the ratio or speed-up that was asked for, and the content of a
file, without the settings that have their default values.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

from tokenmerge.config.checks import (
    MOST_STEPS,
    at_least_1,
    check_fields,
    integer,
    number,
    of_type,
    optional,
    refuse,
)
from tokenmerge.config.former import takes_former_names
from tokenmerge.config.origin import is_default
from tokenmerge.config.tome import ToMeConfig
from tokenmerge.errors import ConfigError, short_repr
from tokenmerge.warn import warn_renamed

VERSION = 1
VERSION_OF_PLANS = 2
NAME = "Token merging"


@takes_former_names(solver="scheduler")
@dataclasses.dataclass(frozen=True)
class FoundFor:
    """The kind of generation that a search found settings for. A field is None if it was not recorded.

    Raises:
        ConfigError: a value is of the wrong type or out of range.
    """

    model: str  # class of the denoiser
    height: int  # of the latents, ≥ 1
    width: int
    steps: int
    scheduler: str | None = None  # its class
    guidance: float | None = None  # scale of classifier-free guidance, ≥ 0, which is 1 without it

    def __post_init__(self) -> None:
        name_of_class = of_type(str, "the name of a class")
        checks = {
            "model": name_of_class,
            "scheduler": optional(name_of_class),
            "height": integer(1),
            "width": integer(1),
            "steps": integer(1, MOST_STEPS),
            "guidance": optional(number("a number ≥ 0", lambda value: value >= 0)),
        }
        check_fields(self, "for.", checks)

    @property
    def solver(self) -> str | None:
        """The former name of ``scheduler``."""
        warn_renamed("FoundFor.solver", "FoundFor.scheduler")
        return self.scheduler

    def differences(
        self,
        model: str | None = None,
        size: tuple[int, int] | None = None,
        steps: int | None = None,
        scheduler: str | None = None,
        guidance: float | None = None,
    ) -> list[str]:
        """Return the differences, each as a part of a sentence. Arguments that are None are not compared.

        >>> FoundFor("UNet2DConditionModel", 64, 64, 20).differences(size=(96, 64), steps=4)
        ['latents of 64 × 64, not 96 × 64', '20 steps, not 4']
        """
        compared = (
            ("{}, not {}", self.model, model),
            ("latents of {0[0]} × {0[1]}, not {1[0]} × {1[1]}", (self.height, self.width), size),
            ("{} steps, not {}", self.steps, steps),
            ("{}, not {}", self.scheduler, scheduler),
            ("guidance {:g}, not {:g}", self.guidance, guidance),
        )
        differing = [one for one in compared if None not in one and one[1] != one[2]]
        return [text.format(own, other) for text, own, other in differing]

    @staticmethod
    def warning(differences: list[str], speedup: float | None = None) -> str:
        """Return the warning about differences from what the settings were found for.

        If a ``speedup`` is given, it says that the default method runs with it instead.
        """
        found_for = f"found for {' and for '.join(differences)}"
        if speedup is None:
            return (
                f"these settings were {found_for}; speed and closeness may differ from what was measured: "
                "run tokenmerge tune again"
            )
        return (
            f"this plan was {found_for}, so the default method runs with speedup={speedup:g} instead; run "
            "tokenmerge tune for this generation"
        )


@dataclasses.dataclass(frozen=True)
class SavedSettings:
    """The content of a file of settings."""

    config: ToMeConfig
    # The kind of generation that ``tokenmerge tune`` found them for, or None if they hold for all generations
    # because they were saved or written by hand.
    found_for: FoundFor | None = None
    # The speed-up that the default method reaches in other generations, or None if they hold for all.
    speedup: float | None = None


def plan_content(saved: SavedSettings) -> dict[str, Any]:
    """Return the content of a file of ``tokenmerge tune``."""
    assert saved.found_for is not None
    return {
        "version": VERSION_OF_PLANS,
        "speedup": saved.speedup,
        "plan": saved.config.changed(),
        "for": dataclasses.asdict(saved.found_for),
    }


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
        path: of a file that :func:`save_config` or ``tokenmerge tune`` wrote, or that was written by hand;
            settings that it does not name have their defaults.

    Raises:
        ConfigError: the file cannot be read, has other content, or has a setting that is unknown or out of
            range; the message names the file and the setting.
    """
    return load_settings(path).config


def load_settings(path: str | Path) -> SavedSettings:
    """Read settings from a file as :func:`load_config` does, and what they were found for."""
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
        return content(found).config
    except ConfigError as error:
        raise ConfigError(f"metadata: {error}") from error


def content(found: Any) -> SavedSettings:
    """Return the settings in the content of a JSON file.

    Raises:
        ConfigError: the content is not that of a file of settings, or a setting is out of range.
    """
    keys = found.keys() if isinstance(found, dict) else set()
    of_tune = keys - {"measured"} == {"version", "speedup", "plan", "for"}
    if not of_tune and keys != {"version", "settings"}:
        wanted = '"version" and "settings", or "version", "speedup", "plan" and "for"'
        got = list(found) if isinstance(found, dict) else found
        refuse("content", f"an object with the keys {wanted}", got)
    version = VERSION_OF_PLANS if of_tune else VERSION
    key = "plan" if of_tune else "settings"
    if found["version"] != version or isinstance(found["version"], bool):
        refuse("version", f"{version}, the one that this release reads", found["version"])
    speedup = at_least_1("speedup", found["speedup"]) if of_tune else None
    if not isinstance(found[key], dict):
        refuse(key, 'settings by name, such as {"ratio": 0.5}', found[key])
    config = ToMeConfig.from_dict(found[key])
    if not of_tune:
        return SavedSettings(config)
    try:
        return SavedSettings(config, FoundFor(**found["for"]), speedup)
    except TypeError:
        names = ", ".join(field.name for field in dataclasses.fields(FoundFor))
        refuse("for", f"an object with the keys {names}", found["for"])


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
