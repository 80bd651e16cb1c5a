"""The settings that a user asks for, and those that hold at one level and step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from tokenmerge.config.checks import Check, check_fields, integer, number, one_of, refuse
from tokenmerge.config.correction import Correction
from tokenmerge.config.names import PARTS, flat, nested
from tokenmerge.config.plan_sharing import PlanSharing
from tokenmerge.config.planner_names import GUIDED_PLANNERS
from tokenmerge.config.schedule import Schedule
from tokenmerge.config.settings import (
    CACHED_FEATURES,
    CHECKS,
    MergeSettings,
    check_changes,
    check_together,
)
from tokenmerge.config.step_reuse import StepReuse
from tokenmerge.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ToMeConfig(MergeSettings):
    """Token merging and step reuse for a diffusion model (arXiv 2303.17604 and later papers).

    ``ratio`` is the main setting. It and the other fields of :class:`tokenmerge.config.MergeSettings` say
    which tokens merge, where and how. The fields below say at which levels and steps. A config is checked
    when it is made and does not change afterwards.

    Args:
        max_downsample: deepest resolution level that merges: 1 is the full latent resolution, 2 half of it,
            then 4 and 8. Raising it saves a little more, because deeper levels hold few tokens, and costs
            quality, because each of those tokens stands for more of the picture. SDXL has no attention at
            level 1 and needs 2 or more.
        schedule: how merging changes over the denoising steps.
        plans: how long a plan is used, and which blocks and prompts share it.
        correction: dense steps that measure what merging loses, so that the others can add it back.
        reuse: step reuse, which skips a part of the model on some steps.
        levels: fields of MergeSettings for single levels: ``{2: {"ratio": 0.25}}``. Merging less at deep
            levels brings the picture closer for little time; merging less at level 1 gives up most of the
            saving.
        by_guidance: settings by name that hold from a scale of classifier-free guidance on: ``{5: {"scope":
            "block", "reuse.every": 1.5}}``. Guidance multiplies the difference between two results, and so
            the errors in it. Under strong guidance, merging loses less than step reuse. This needs a pipeline
            that reports its scale; elsewhere the config's own settings hold.

    Settings that depend on the denoising step need a pipeline, whose scheduler tells the step. In your own
    loop, call ``patch.at_step(i, steps)``. With such settings the blocks of a model can be compiled, but not
    the whole model as one graph. Caches between steps are emptied after the last step.

    Raises:
        ConfigError: a value is outside these ranges, or two settings do not go together.

    >>> ToMeConfig(ratio=0.4, reuse=StepReuse(every=2))
    ToMeConfig(ratio=0.4, reuse=StepReuse(every=2))
    """

    max_downsample: int = 1
    schedule: Schedule = dataclasses.field(default_factory=Schedule)
    plans: PlanSharing = dataclasses.field(default_factory=PlanSharing)
    correction: Correction = dataclasses.field(default_factory=Correction)
    reuse: StepReuse = dataclasses.field(default_factory=StepReuse)
    levels: Mapping[int, Mapping[str, Any]] = dataclasses.field(default_factory=dict, hash=False)
    by_guidance: Mapping[float, Mapping[str, Any]] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_fields(self, "", {**CHECKS, "max_downsample": one_of((1, 2, 4, 8))})
        check_fields(self, "", {name: _is_part(part) for name, part in PARTS.items()})
        check_fields(self, "", {"levels": _check_levels, "by_guidance": self._check_by_guidance})
        self._check_stages()
        if self.asks_guidance and not self.plans.guidance:
            raise ConfigError(
                f"plans.guidance: planner={self.guided_planner!r} compares the guided and the unguided "
                "result, which plans.guidance=False does not allow; leave it out, or take another planner"
            )
        if self.correction.on and "keys" in self._all("scope"):
            raise ConfigError(
                f"correction.every={self.correction.every}: with scope='keys' every token has a residual of "
                "its own, so there is nothing to correct; take another scope, or correction.every=0"
            )

    def _check_by_guidance(self, name: str, value: Any) -> dict[float, dict[str, Any]]:
        """Check settings by the scale of guidance, and sort them by it."""
        if not isinstance(value, Mapping) or not all(isinstance(own, Mapping) for own in value.values()):
            refuse(name, "{guidance scale: {setting: value}}", value)
        scales = {_scale(name, scale): flat(own) for scale, own in value.items()}
        for scale, own in scales.items():
            if fixed := [str(setting) for setting in own if setting not in _BY_GUIDANCE]:
                raise ConfigError(
                    f"{name}: cannot change {', '.join(fixed)}; what can be changed is "
                    f"{', '.join(_BY_GUIDANCE)}"
                )
            try:
                self._changed(own)
            except ConfigError as error:
                raise ConfigError(f"{name}[{scale:g}]: {error}") from error
        return dict(sorted(scales.items()))

    def _check_stages(self) -> None:
        """Check that settings fit together on every level and in every phase, where the ratio is highest."""
        factor = self.schedule.highest_factor
        for level in (0, *self.levels):
            phases = (0.0, *self.schedule.phases)
            # The settings for stronger guidance come after these, and have been checked already.
            for phase, settings in zip(phases, self.stages(level), strict=False):
                changed = [f"levels[{level}]"] * (level > 0) + [f"schedule.phases[{phase}]"] * (phase > 0)
                check_together(settings, "".join(f"{name}: " for name in changed), factor)

    def at_guidance(self, scale: float | None) -> ToMeConfig:
        """The settings at a scale of classifier-free guidance; None: unknown.

        >>> ToMeConfig(ratio=0.4, by_guidance={5: {"ratio": 0.2}}).at_guidance(7.5)
        ToMeConfig(ratio=0.2)
        """
        changes: dict[str, Any] = {}
        for start, own in self.by_guidance.items():
            if scale is not None and scale >= start:
                changes |= own
        return self._changed(changes) if self.by_guidance else self

    def variants(self) -> tuple[ToMeConfig, ...]:
        """The settings at each scale of guidance where they change, the weakest first."""
        return _variants(self) if self.by_guidance else (self,)

    def _changed(self, changes: Mapping[str, Any]) -> ToMeConfig:
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return ToMeConfig(**nested({**flat(own), "by_guidance": {}, **changes}))

    def at(self, level: int, index: int, steps: int) -> MergeSettings:
        """The settings of a level at step ``index`` of ``steps``.

        >>> config = ToMeConfig(ratio=0.5, schedule=Schedule(ratio=(1.0, 0.0)), levels={2: {"ratio": 0.2}})
        >>> [config.at(1, i, 3).ratio for i in range(3)], config.at(2, 0, 3).ratio
        ([0.5, 0.25, 0.0], 0.2)
        """
        changes = list(self.schedule.changes())[self.schedule.phase(index, steps)]
        factor = self.schedule.factor(index, steps)
        return self._settings({**changes, **self.levels.get(level, {})}, factor)

    def stages(self, level: int) -> Iterator[MergeSettings]:
        """The settings of a level at the beginning and in each phase, at the step that merges most.

        Those for weak guidance come first.
        """
        for changes in self.schedule.changes():
            yield self._settings({**changes, **self.levels.get(level, {})}, self.schedule.highest_factor)
        if self.by_guidance:
            for stronger in self.variants()[1:]:
                yield from stronger.stages(level)

    def most(self) -> ToMeConfig:
        """The settings of the step that merges most, for all steps; settings of single levels stay."""
        factor = self.schedule.highest_factor
        changes = max(self.schedule.changes(), key=lambda changes: changes.get("ratio", self.ratio))
        levels = {level: _scaled(own, factor) for level, own in self.levels.items()}
        settings = vars(self._settings(changes, factor))
        sharing = PlanSharing(blocks=self.plans.blocks, guidance=self.plans.guidance)
        return ToMeConfig(**settings, max_downsample=self.max_downsample, plans=sharing, levels=levels)

    def _settings(self, changes: Mapping[str, Any], factor: float) -> MergeSettings:
        values = {name: changes[name] if name in changes else getattr(self, name) for name in CHECKS}
        return MergeSettings(**_scaled(values, factor))

    @property
    def follows_steps(self) -> bool:
        """Whether any setting depends on the denoising step."""
        return any(on for own in self.variants() for _, _, on in own._over_steps())

    @property
    def reuses_steps(self) -> bool:
        """Whether any step may skip something."""
        return any(own.reuse.on for own in self.variants())

    @property
    def given_reuse(self) -> str:
        """The setting that turns step reuse on, for messages: ``"reuse.every=2"``."""
        return next((own.reuse.given for own in self.variants() if own.reuse.on), self.reuse.given)

    @property
    def over_steps(self) -> tuple[str, ...]:
        """The settings that depend on the denoising step, as they were given."""
        given = (
            f"{name}={value!r}" for own in self.variants() for name, value, on in own._over_steps() if on
        )
        return tuple(dict.fromkeys(given))

    def _over_steps(self) -> tuple[tuple[str, Any, bool], ...]:
        """Name and value of each setting that may depend on the step, and whether it does."""
        schedule, planner, features = self.schedule, self.guided_planner, self.cached_features
        return (
            ("schedule.start", schedule.start, schedule.start > 0),
            ("schedule.until", schedule.until, schedule.until < 1),
            ("schedule.ratio", schedule.ratio, schedule.changes_ratio),
            ("schedule.phases", schedule.phases, bool(schedule.phases)),
            ("plans.every", self.plans.every, self.plans.every > 1),
            ("correction.every", self.correction.every, self.correction.every > 0),
            ("reuse.full_steps", self.reuse.full_steps, bool(self.reuse.full_steps)),
            ("reuse.every", self.reuse.every, self.reuse.on and not self.reuse.full_steps),
            ("planner", planner, planner is not None),
            ("features", features, features is not None),
        )

    @property
    def cached_features(self) -> str | None:
        """The first features, of any level and any step, that are cached from the step before."""
        return next((name for name in self._all("features") if name in CACHED_FEATURES), None)

    @property
    def asks_guidance(self) -> bool:
        """Whether plans depend on what guidance changed in the last step."""
        return self.guided_planner is not None

    @property
    def guided_planner(self) -> str | None:
        """The first planner, of any level and any step, that looks at what guidance changed."""
        return next((name for name in self._all("planner") if name in GUIDED_PLANNERS), None)

    def _all(self, name: str) -> list[Any]:
        """The values of a setting: its own, and those of any level, phase or scale of guidance."""
        changes = (*self.levels.values(), *self.schedule.phases.values(), *self.by_guidance.values())
        return [getattr(self, name), *(change[name] for change in changes if name in change)]

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, with the parts nested."""
        values = dataclasses.asdict(self)
        for part in PARTS:
            for name, own in values[part].items():
                values[part][name] = list(own) if isinstance(own, tuple) else own
        return values

    def changed(self) -> dict[str, Any]:
        """The ratio, and the settings that differ from the defaults, by dotted name.

        >>> ToMeConfig(reuse=StepReuse(every=2)).changed()
        {'ratio': 0.5, 'reuse.every': 2}
        """
        own, defaults = flat(vars(self)), flat(vars(ToMeConfig()))
        return {name: value for name, value in own.items() if name == "ratio" or value != defaults[name]}

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> ToMeConfig:
        """The config that has these settings, and defaults for the others.

        Args:
            settings: as :meth:`to_dict` returns them, also after JSON has turned their keys into text; or by
                dotted name, ``{"reuse.every": 2}``; or by the names of old records, ``{"reuse_every": 2}``.

        Raises:
            ConfigError: a setting is unknown or given twice, or a value is out of range.

        >>> ToMeConfig.from_dict({"ratio": 0.4, "reuse": {"every": 2}, "share_plan": True})
        ToMeConfig(ratio=0.4, plans=PlanSharing(blocks=True), reuse=StepReuse(every=2))
        """
        given = flat(settings)
        if unknown := [str(name) for name in given if name not in SETTINGS]:
            raise ConfigError(f"expected settings out of {', '.join(SETTINGS)}, got {', '.join(unknown)}")
        for name, kind in (("levels", int), ("schedule.phases", float), ("by_guidance", float)):
            if isinstance(given.get(name), Mapping):
                given[name] = {_number(key, kind): own for key, own in given[name].items()}
        return cls(**nested(given))


def _scaled(settings: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Settings with the ratios among them multiplied by a factor."""
    ratios = {name: settings[name] for name in ("ratio", "reference_ratio") if name in settings}
    return {**settings, **{name: ratio * factor for name, ratio in ratios.items() if ratio is not None}}


@functools.lru_cache(maxsize=64)
def _variants(config: ToMeConfig) -> tuple[ToMeConfig, ...]:
    return (config.at_guidance(None), *map(config.at_guidance, config.by_guidance))


def _is_part(part: type) -> Check:
    example = "Schedule(until=0.8)" if part is Schedule else f"{part.__name__}(every=2)"

    def check(name: str, value: Any) -> Any:
        if not isinstance(value, part):
            refuse(name, f"a {part.__name__} such as {example}", value)
        return value

    return check


def _check_levels(name: str, value: Any) -> dict[int, dict[str, Any]]:
    return check_changes(name, "level", integer(1), value)


def _number(key: object, kind: type[int] | type[float]) -> Any:
    """A key that JSON turned into text, as a number again; unchanged if it is no number."""
    try:
        return kind(key) if isinstance(key, str) else key
    except ValueError:
        return key


_scale = number("a guidance scale ≥ 0", lambda value: value >= 0)
# Settings that can change with the scale of guidance.
_BY_GUIDANCE = (
    *CHECKS,
    *(name for name in flat(vars(ToMeConfig())) if name.startswith(("schedule.", "correction.", "reuse."))),
)
# Names of all settings: ratio and max_downsample first, as a label of a run shows them.
SETTINGS = tuple(dict.fromkeys(["ratio", "max_downsample", *flat(vars(ToMeConfig()))]))
