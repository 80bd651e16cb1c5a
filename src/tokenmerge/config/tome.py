"""The settings that a user asks for, and what holds at one step and level."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from tokenmerge.config.checks import (
    check_fields,
    of_type,
    one_of,
    unchecked,
)
from tokenmerge.config.former import FORMER_PARTS, takes_former_names
from tokenmerge.config.parts import PARTS, Correction, MergeSharing, StepReuse, check_known, flat
from tokenmerge.config.rules import REUSE_EVERY, Rule, Rules, check_rules
from tokenmerge.config.settings import CACHED_FEATURES, CHECKS, GUIDED_PLANNERS, MergeSettings, check_together
from tokenmerge.errors import ConfigError
from tokenmerge.warn import warn_renamed


@takes_former_names(**FORMER_PARTS)
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ToMeConfig(MergeSettings):
    """Token merging and step reuse for a diffusion model (arXiv 2303.17604 and later papers).

    ``ratio`` is the main setting. It and the other fields of :class:`tokenmerge.config.MergeSettings` say
    which tokens merge, where and how. A config is checked when it is made and does not change afterwards.

    Args:
        max_downsample: deepest resolution level that merges: 1 is the full latent resolution, 2 half of it,
            then 4 and 8. The finest level that can merge always does, which is 2 in SDXL. Raising it saves a
            little more, because deeper levels hold few tokens, and costs quality, because each of those
            tokens stands for more of the image.
        plans: how long a plan is used, and which blocks and prompts share it.
        correction: steps that merge nothing and measure what merging loses, for the others to add it back.
        reuse: step reuse, which skips a part of the model on some steps.
        rules: settings that hold at a level or in some steps, see :class:`tokenmerge.config.Rule`:
            ``[{"level": 2, "ratio": 0.25}, {"start": 0.4, "planner": "tome"}]``. Later rules win. Merging
            less in late steps saves as much as merging less in early ones, and changes the image less.

    Settings that depend on the denoising step need a pipeline, whose scheduler tells the step. In your own
    loop, call ``patch.at_step(i, steps)``. With such settings the blocks of a model can be compiled, but not
    the whole model as one graph. Caches between steps are emptied after the last step.

    Raises:
        ConfigError: a value is outside these ranges, or two settings do not go together.

    >>> ToMeConfig(ratio=0.4, reuse=StepReuse(every=2))
    ToMeConfig(ratio=0.4, reuse=StepReuse(every=2))
    """

    max_downsample: int = 1
    merge_sharing: MergeSharing = dataclasses.field(default_factory=MergeSharing)
    correction: Correction = dataclasses.field(default_factory=Correction)
    reuse: StepReuse = dataclasses.field(default_factory=StepReuse)
    rules: Rules = ()

    def __post_init__(self) -> None:
        parts = {
            name: of_type(part, f"a {part.__name__} such as {part.__name__}(every=2)")
            for name, part in PARTS.items()
        }
        levels = one_of((1, 2, 4, 8))
        check_fields(self, "", {**CHECKS, "max_downsample": levels, **parts, "rules": check_rules})
        _check_together(unchecked(self, rules=()))
        try:
            _check_together(self)
        except ConfigError:
            for place in range(len(self.rules)):  # name the first rule that does not fit those before it
                try:
                    _check_together(unchecked(self, rules=self.rules[: place + 1]))
                except ConfigError as error:
                    raise ConfigError(f"rules[{place}]: {error}") from error

    @property
    def plans(self) -> MergeSharing:
        """The former name of ``merge_sharing``."""
        warn_renamed("ToMeConfig.plans", "ToMeConfig.merge_sharing")
        return self.merge_sharing

    def at_step(self, index: int, steps: int) -> ToMeConfig:
        """Return the settings of all levels at step ``index`` of ``steps``.

        >>> config = ToMeConfig(rules=[{"start": 0.5, "ratio": 0.4}, {"level": 2, "ratio": 0.2}])
        >>> config.at_step(0, 2).ratio, config.at_step(1, 2).ratio, config.at_step(1, 2).at_level(2).ratio
        (0.5, 0.4, 0.2)
        """
        return _at_step(self, index, steps) if self.rules else self

    @functools.lru_cache(maxsize=1024)  # noqa: B019 - settings are few and small
    def at_level(self, level: int) -> MergeSettings:
        """Return the settings of a level by the rules that hold at all steps."""
        settings = {name: getattr(self, name) for name in CHECKS}
        for rule in self.rules:
            if rule.level in (None, level) and not rule.of_steps:
                settings |= rule.changes
        return MergeSettings(**settings)

    @functools.lru_cache(maxsize=256)  # noqa: B019
    def phases(self) -> tuple[ToMeConfig, ...]:
        """Return the settings of every phase, from the first step on: rules begin and end between phases."""
        starts = {0.0}
        for rule in self.rules:
            starts |= {rule.start, rule.until}
        starts.discard(1.0)  # the end

        def phase(done: float) -> ToMeConfig:
            return _at_time(self, lambda rule: rule.start <= done < rule.until)

        return tuple(dict.fromkeys(map(phase, sorted(starts))))

    @property
    def follows_steps(self) -> bool:
        """Whether any setting depends on the denoising step."""
        return bool(self.over_steps)

    @property
    def over_steps(self) -> tuple[str, ...]:
        """The settings that depend on the denoising step, as they were given."""
        given = [f"rules[{place}]={rule}" for place, rule in enumerate(self.rules) if rule.of_steps]
        if self.merge_sharing.every > 1:
            given.append(f"merge_sharing.every={self.merge_sharing.every}")
        if self.correction.on:
            given.append(f"correction.every={self.correction.every}")
        if self.reuse.on:
            given.append(self.reuse.given)
        if self.guided_planner is not None:
            given.append(f"planner={self.guided_planner!r}")
        if self.cached_features is not None:
            given.append(f"features={self.cached_features!r}")
        return tuple(given)

    @property
    def cached_features(self) -> str | None:
        """The first features of any level and step that are cached from the step before, or None."""
        return next((name for name in self._all("features") if name in CACHED_FEATURES), None)

    @property
    def merges(self) -> bool:
        """Whether anything may merge, at any level and any step."""
        return any(self._all("ratio")) or any(self._all("reference_ratio"))

    @property
    def guided_planner(self) -> str | None:
        """The first planner of any level and step that looks at what guidance changed, or None."""
        return next((name for name in self._all("planner") if name in GUIDED_PLANNERS), None)

    def _all(self, name: str) -> list[Any]:
        return [getattr(self, name), *(rule.changes[name] for rule in self.rules if name in rule.changes)]

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values, with the parts nested."""
        parts = {name: dataclasses.asdict(getattr(self, name)) for name in PARTS}
        for part in parts.values():
            part |= {name: list(value) for name, value in part.items() if isinstance(value, tuple)}
        return {**vars(self), **parts, "rules": [rule.to_dict() for rule in self.rules]}

    def changed(self) -> dict[str, Any]:
        """Return the ratio, and the settings that differ from the defaults, by dotted name.

        >>> ToMeConfig(reuse=StepReuse(every=2)).changed()
        {'ratio': 0.5, 'reuse.every': 2}
        """
        settings = flat(self.to_dict())
        defaults = flat(ToMeConfig().to_dict())
        return {name: value for name, value in settings.items() if name == "ratio" or value != defaults[name]}

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> ToMeConfig:
        """Return the config that has these settings, and defaults for the others.

        Args:
            settings: as :meth:`to_dict` returns them, or by dotted name, ``{"reuse.every": 2}``.

        Raises:
            ConfigError: a setting is unknown or given twice, or a value is out of range.

        >>> ToMeConfig.from_dict({"ratio": 0.4, "reuse": {"every": 2}, "merge_sharing.blocks": True})
        ToMeConfig(ratio=0.4, merge_sharing=MergeSharing(blocks=True), reuse=StepReuse(every=2))
        """
        given = flat(settings)
        check_known(given, SETTINGS)
        parts: dict[str, dict[str, Any]] = {}
        for name, value in given.items():
            part, _, field = name.rpartition(".")
            parts.setdefault(part, {})[field] = value
        arguments = parts.pop("", {})
        for name, fields in parts.items():
            arguments[name] = PARTS[name](**fields)
        return cls(**arguments)


@functools.lru_cache(maxsize=1024)
def _at_step(config: ToMeConfig, index: int, steps: int) -> ToMeConfig:
    return _at_time(config, lambda rule: round(rule.start * steps) <= index < round(rule.until * steps))


def _at_time(config: ToMeConfig, holds: Callable[[Rule], bool]) -> ToMeConfig:
    """Return the settings of all levels at a time at which some rules hold. They were checked before."""
    changes: dict[str, Any] = {}
    of_levels: list[Rule] = []
    for rule in reversed([rule for rule in config.rules if holds(rule)]):
        # Later rules win.
        remaining = {name: value for name, value in rule.changes.items() if name not in changes}
        if rule.level is None:
            changes |= remaining
        elif remaining:
            of_levels.append(unchecked(rule, start=0.0, until=1.0, changes=remaining))
    if REUSE_EVERY in changes:
        changes["reuse"] = unchecked(config.reuse, every=changes.pop(REUSE_EVERY))
    return unchecked(config, **changes, rules=tuple(reversed(of_levels)))


def _check_together(config: ToMeConfig) -> None:
    levels = {rule.level or 0 for rule in config.rules} | {0}
    settings = [phase.at_level(level) for phase in config.phases() for level in sorted(levels)]
    for one in settings:
        check_together(one)
    if config.correction.on and any(one.scope == "keys" for one in settings):
        raise ConfigError(
            f"correction.every={config.correction.every}: with scope='keys' every token has a residual of "
            "its own, so there is nothing to correct; take another scope, or correction.every=0"
        )
    if config.guided_planner is not None and not config.merge_sharing.guidance:
        raise ConfigError(
            f"merge_sharing.guidance: planner={config.guided_planner!r} compares the guided and the unguided "
            "result, which merge_sharing.guidance=False does not allow; leave it out, or take another planner"
        )


# Names of all settings: ratio and max_downsample first, as a label of a run shows them.
SETTINGS = tuple(dict.fromkeys(["ratio", "max_downsample", *flat(vars(ToMeConfig()))]))
