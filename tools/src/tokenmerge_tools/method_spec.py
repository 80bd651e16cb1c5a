"""Methods and settings as a user types them, and their configuration."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from tokenmerge import presets
from tokenmerge.config import SETTINGS, Rule, ToMeConfig, check_known, flat
from tokenmerge.config.checks import number
from tokenmerge.config.former import current_name
from tokenmerge.default_method import settings_for
from tokenmerge.errors import ConfigError, nearest_of, short_repr

AUTO = "auto"
DEFAULT_SPEEDUP = 2.0
SPEEDUP = "speedup"
OF_AUTO = (SPEEDUP, *(name for name in SETTINGS if name != "ratio"))  # the settings that auto takes
METHODS = (AUTO, "tome", *presets.__all__)


@dataclasses.dataclass(frozen=True)
class MethodSpec:
    """A method, and changes to its settings.

    Args:
        method: ``"auto"`` is the default method, which chooses settings for a wanted ``speedup``.
            ``"tome"`` has the defaults of :class:`tokenmerge.ToMeConfig`. The other methods are the functions
            of :mod:`tokenmerge.presets`, by name.
        changes: settings that replace the method's own, by name, such as ``"reuse.every"``.
            ``"auto"`` takes a ``"speedup"`` (default: 2.0) in place of a ratio.
        source: file that the settings come from, for texts, or an empty text if the user gave them.

    >>> MethodSpec("sito", {"max_downsample": 2}).config().combine
    'keep'
    """

    method: str = AUTO
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    source: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            also = nearest_of(self.method, METHODS)
            raise ConfigError(f"method: expected one of {', '.join(METHODS)}, got {self.method!r}{also}")
        object.__setattr__(self, "changes", flat(self.changes))
        if not self.needs_model:
            self.config()
            return
        if "ratio" in self.changes:
            raise ConfigError(
                "ratio: the method auto takes a speed-up, as it chooses the ratio itself; give speedup=2, or "
                "another method"
            )
        check_speedup(SPEEDUP, self.changes.get(SPEEDUP, DEFAULT_SPEEDUP))
        # shallow_every must not exceed every, which the method may choose.
        shallow = self.changes.get("reuse.shallow_every", 1)
        ToMeConfig.from_dict({"reuse.every": shallow, **self._settings})

    @property
    def needs_model(self) -> bool:
        """Whether the settings depend on the model."""
        return self.method == AUTO

    @property
    def is_default_method(self) -> bool:
        """Whether it is the default method without changes, which plans each generation when it begins."""
        return self.needs_model and not self._settings

    @property
    def speedup(self) -> float:
        """The wanted speed-up of the default method."""
        return float(self.changes.get("speedup", DEFAULT_SPEEDUP))

    @property
    def tuned_file(self) -> str | None:
        """The file of ``tokenmerge tune`` that corrects the estimates, or None without one."""
        return self.source if self.is_default_method and self.source.endswith(".json") else None

    @property
    def title(self) -> str:
        """What was asked for, in a few words."""
        if self.source:
            return f"the settings in {self.source}"
        if self.needs_model:
            return f"the default method, speedup={self.speedup:g}"
        return f"{self.method}, ratio {self.config().ratio:g}"

    @property
    def argument(self) -> str:
        """The argument that asks for the same in ``apply_token_merging``, or an empty text if none is short.

        >>> MethodSpec().argument, MethodSpec("toma", {"ratio": 0.6}).argument
        ('speedup=2.0', "'toma', ratio=0.6")
        """
        if self.source.endswith(".json"):
            return repr(self.source)
        ratio = self.changes.get("ratio", 0.5)
        if self == merging_alone(ratio, {}):
            return f"ratio={ratio:g}"
        if self.source or self.method == "tome" or set(self.changes) - {SPEEDUP, "ratio"}:
            return ""
        return f"speedup={self.speedup}" if self.needs_model else f"{self.method!r}, ratio={ratio:g}"

    @property
    def text(self) -> str:
        """The method and its changes as a variant, such as ``"tome:ratio=0.5,proportional=True"``."""
        return f"{self.method}:" + ",".join(
            f"{name}={as_plain(value)}" for name, value in self.changes.items()
        )

    @property
    def _settings(self) -> dict[str, Any]:
        return {name: value for name, value in self.changes.items() if name != "speedup"}

    def config(self, pipe_or_model: object = None, **generation: Any) -> ToMeConfig:
        """Return the configuration.

        The model and the facts about the generation are used only if :attr:`needs_model` is true. The facts
        are those of :func:`tokenmerge.default_method.settings_for`.
        """
        if self.needs_model:
            chosen = settings_for(pipe_or_model, self.speedup, **generation)
            every = self.changes.get("reuse.every", chosen.reuse.every)
            # shallow_every must not exceed every, so lowering one lowers both.
            shallow = min(chosen.reuse.shallow_every, every)
            settings = {**flat(vars(chosen)), "reuse.shallow_every": shallow}
            # The places of the chosen plan do not fit other numbers of step reuse.
            if any(name.startswith("reuse.") for name in self.changes):
                settings |= {"reuse.full_steps": (), "reuse.shallow_steps": ()}
            return ToMeConfig.from_dict({**settings, **self._settings})
        if self.method == "tome":
            return ToMeConfig.from_dict(self.changes)
        make: Callable[..., ToMeConfig] = getattr(presets, self.method)
        return make(**self.changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the method and its changes as plain values, for records."""
        return {"method": self.method, **{name: as_plain(value) for name, value in self.changes.items()}}


def check_speedup(name: str, value: Any) -> float:
    """Accept a speed-up."""
    return number("a number ≥ 1, such as 2.0", lambda value: value >= 1)(name, value)


def merging_alone(ratio: float | None, changes: Mapping[str, Any]) -> MethodSpec:
    """Return a method that merges a share of the tokens and skips nothing, with changed settings."""
    return MethodSpec("tome", {"planner": "tiled", "proportional": True, "ratio": ratio, **changes})


def read_setting(text: str, names: Collection[str] = SETTINGS) -> tuple[str, Any]:
    """Read ``NAME=VALUE``, or ``NAME`` alone to switch a setting on.

    A list, such as ``reuse.full_steps``, is written as numbers separated by ``/``, or as JSON. ``rules`` are
    JSON.

    >>> read_setting("merge_mlp"), read_setting("seed=none"), read_setting("reuse.every=2")
    (('merge_mlp', True), ('seed', None), ('reuse.every', 2))
    >>> read_setting('rules=[{"level": 2, "ratio": 0.25}]')
    ('rules', ({'level': 2, 'ratio': 0.25},))
    """
    name, equals, value = (part.strip() for part in text.partition("="))
    name = current_name(name)
    check_known([name], names)
    switch = isinstance(_DEFAULTS[name], bool)
    read, wanted = _READERS[name]
    try:
        return name, read("true" if switch and not equals else value)
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{name}: expected {name}={wanted}, got {short_repr(text)}") from error


def as_plain(value: Any) -> str | int | float | bool:
    """Return a setting's value as records and labels have it, and as :func:`read_setting` reads it.

    >>> as_plain((0, 0.5)), as_plain([{"level": 2, "ratio": 0.25}]), as_plain(None), as_plain(0.5)
    ('0/0.5', '[{"level": 2, "ratio": 0.25}]', 'none', 0.5)
    """
    if value is None:
        return "none"
    if isinstance(value, tuple | list) and value and isinstance(value[0], Mapping | Rule):
        return json.dumps([Rule.of(rule).to_dict() for rule in value])
    return "/".join(f"{number:g}" for number in value) if isinstance(value, tuple) else value


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, json.loads(text) if text.startswith("[") else text.split("/")))


def _rules(text: str) -> tuple[Rule, ...]:
    return tuple(map(Rule.of, json.loads(text)))


def _seed(text: str) -> int | None:
    return None if text.lower() == "none" else int(text)


_DEFAULTS = {SPEEDUP: DEFAULT_SPEEDUP, **flat(vars(ToMeConfig()))}
_OF_TYPE: dict[type, tuple[Callable[[str], Any], str]] = {
    bool: (lambda text: {"true": True, "false": False}[text.lower()], "true or false"),
    int: (int, "INTEGER"),
    float: (float, "NUMBER"),
    str: (str, "WORD"),
}
_READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    **{name: _OF_TYPE[type(value)] for name, value in _DEFAULTS.items() if type(value) in _OF_TYPE},
    "rules": (_rules, 'JSON such as [{"level": 2, "ratio": 0.25}]'),
    "seed": (_seed, "INTEGER or none"),
    **dict.fromkeys((SPEEDUP, "reuse.every", "reuse.shallow_every"), (_number, "NUMBER")),
    "reference_ratio": (float, "NUMBER"),
    "reuse.full_steps": (_numbers, "NUMBER/NUMBER…, such as 0/0.05/0.5/1"),
    "reuse.shallow_steps": (_numbers, "NUMBER/NUMBER…, such as 0/0.05/0.25/0.5/1"),
}
