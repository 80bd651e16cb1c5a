"""Methods and settings as a user types them, and their configuration."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from tokenmerge import presets
from tokenmerge.auto import choose
from tokenmerge.config import NEW_NAMES, SETTINGS, Rule, ToMeConfig, flat, with_rules, without_removed
from tokenmerge.errors import ConfigError, shown

AUTO = "auto"
METHODS = (AUTO, "tome", *presets.__all__)


@dataclasses.dataclass(frozen=True)
class MethodSpec:
    """A method, and changes to its settings.

    Args:
        method: ``"auto"`` chooses settings for the model and the device (:func:`tokenmerge.auto.choose`).
            ``"tome"`` has the defaults of :class:`tokenmerge.ToMeConfig`. The other methods are the functions
            of :mod:`tokenmerge.presets`, by name.
        changes: settings that replace the method's own at every guidance scale, by name, such as
            ``"reuse.every"``. Former names are accepted too.

    >>> MethodSpec("sito", {"max_downsample": 2}).config().combine
    'keep'
    """

    method: str = AUTO
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"method: expected one of {', '.join(METHODS)}, got {self.method!r}")
        object.__setattr__(self, "changes", flat(with_rules(self.changes)))
        if self.needs_model:
            # shallow_every must not exceed every, which the method may choose.
            shallow = self.changes.get("reuse.shallow_every", 1)
            ToMeConfig.from_dict({"reuse.every": shallow, **self.changes})
        else:
            self.config()

    @property
    def needs_model(self) -> bool:
        """Whether the settings depend on the model."""
        return self.method == AUTO

    def config(self, pipe_or_model: object = None, follows_steps: bool | None = None) -> ToMeConfig:
        """Return the configuration.

        The model is used only if :attr:`needs_model` is true. ``follows_steps`` is as for
        :func:`tokenmerge.auto.choose`.
        """
        if self.needs_model:
            chosen = choose(pipe_or_model, self.changes.get("ratio", ToMeConfig.ratio), follows_steps)
            every = self.changes.get("reuse.every", chosen.reuse.every)
            shallow = min(chosen.reuse.shallow_every, every)  # lowering one setting lowers both
            own = {**flat(vars(chosen)), "reuse.shallow_every": shallow}
            # The ratio is the argument of `choose`, which may merge fewer tokens and skip more steps.
            changes = {name: value for name, value in self.changes.items() if name != "ratio"}
            rules = (*_without(chosen.rules, changes), *changes.pop("rules", ()))
            return ToMeConfig.from_dict({**own, **changes, "rules": rules})
        if self.method == "tome":
            return ToMeConfig.from_dict(self.changes)
        make: Callable[..., ToMeConfig] = getattr(presets, self.method)
        return make(**self.changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the method and its changes as plain values, for records."""
        return {"method": self.method, **{name: as_plain(value) for name, value in self.changes.items()}}


def _without(rules: Iterable[Rule], changes: Mapping[str, Any]) -> Iterator[Rule]:
    """Yield the rules of a method without the settings that are changed: a change holds everywhere.

    >>> rule = Rule(guidance=5, changes={"ratio": 0.6, "reuse.every": 3, "reuse.shallow_every": 2})
    >>> list(_without([rule], {"reuse.every": 1}))
    [{'guidance': 5.0, 'ratio': 0.6, 'reuse.shallow_every': 1}]
    """
    for rule in rules:
        left = {name: value for name, value in rule.changes.items() if name not in changes}
        every = {**rule.changes, **changes}.get("reuse.every")
        if every is not None and "reuse.shallow_every" in left:
            left["reuse.shallow_every"] = min(left["reuse.shallow_every"], every)
        if left:
            yield dataclasses.replace(rule, changes=left)


def read_setting(text: str, names: Collection[str] = SETTINGS) -> tuple[str, Any]:
    """Read ``NAME=VALUE``, or ``NAME`` alone to switch a setting on.

    A list, such as ``reuse.full_steps``, is written as numbers separated by ``/``, or as JSON. ``rules`` are
    JSON. Former names, such as ``reuse_every``, are replaced by the present ones.

    >>> read_setting("merge_mlp"), read_setting("seed=none"), read_setting("reuse_every=2")
    (('merge_mlp', True), ('seed', None), ('reuse.every', 2))
    >>> read_setting('rules=[{"level": 2, "ratio": 0.25}]')
    ('rules', ({'level': 2, 'ratio': 0.25},))
    """
    name, equals, value = (part.strip() for part in text.partition("="))
    name = NEW_NAMES.get(name, name)
    without_removed({name: value})
    if name not in names:
        raise ConfigError(f"expected settings out of {', '.join(names)}, got {shown(name)}")
    switch = isinstance(_DEFAULTS[name], bool)
    read, wanted = _READERS[name]
    try:
        return name, read("true" if switch and not equals else value)
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{name}: expected {name}={wanted}, got {shown(text)}") from error


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


def _switch(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, json.loads(text) if text.startswith("[") else text.split("/")))


def _rules(text: str) -> tuple[Rule, ...]:
    return tuple(map(Rule.of, json.loads(text)))


def _seed(text: str) -> int | None:
    return None if text.lower() == "none" else int(text)


_DEFAULTS = flat(vars(ToMeConfig()))
_OF_TYPE: dict[type, tuple[Callable[[str], Any], str]] = {
    bool: (_switch, "true or false"),
    int: (int, "INTEGER"),
    float: (float, "NUMBER"),
    str: (str, "WORD"),
}
_READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    **{name: _OF_TYPE[type(value)] for name, value in _DEFAULTS.items() if type(value) in _OF_TYPE},
    "rules": (_rules, 'JSON such as [{"level": 2, "ratio": 0.25}]'),
    "seed": (_seed, "INTEGER or none"),
    **dict.fromkeys(("reuse.every", "reuse.shallow_every"), (_number, "NUMBER")),
    **dict.fromkeys(("reference_ratio", "reuse.spacing"), (float, "NUMBER")),
    "reuse.ends": (str, "full or free"),
    "reuse.full_steps": (_numbers, "NUMBER/NUMBER…, such as 0/0.05/0.5/1"),
    "reuse.shallow_steps": (_numbers, "NUMBER/NUMBER…, such as 0/0.05/0.25/0.5/1"),
}


def check_compile(config: ToMeConfig) -> None:
    """Check that settings work with ``torch.compile`` of the whole model."""
    if config.follows_steps:
        raise ConfigError(
            "compile: settings that follow the denoising steps cannot be compiled into one graph with the "
            "model; leave --compile out, or take a method that is the same at every step"
        )
