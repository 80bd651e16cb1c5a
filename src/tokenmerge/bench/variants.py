"""What a benchmark compares: one entry for each variant."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from tokenmerge.bench import apply
from tokenmerge.bench.records import variant_label
from tokenmerge.config import ToMeConfig
from tokenmerge.errors import ConfigError

__all__ = ["DENSE", "FEWER_STEPS", "ORACLE", "VARIANTS", "Variant", "VariantSpec", "parse_variant"]

DENSE, ORACLE, FEWER_STEPS = "dense", "oracle", "fewer-steps"


@dataclasses.dataclass(frozen=True)
class Variant:
    """How a variant is called and applied.

    Args:
        apply: called with the model, its configuration and the report on it at the size at hand (both None
            for a variant without settings); the variant is in force while the context lasts.
        config: class of its settings, a dataclass with a field ``ratio``; None: it has none.
        of_pipeline: whether it is put on a whole pipeline where there is one, instead of its denoiser.
        merges: whether it makes usable pictures from fewer tokens: then it gets an oracle and fewer steps
            beside it.
        missing: why it cannot run here, or None.
        not_taken: settings of ``config`` that it does not know.
    """

    apply: Callable[..., AbstractContextManager[None]]
    config: type[ToMeConfig] | None = None
    of_pipeline: bool = False
    merges: bool = False
    missing: Callable[[], str | None] = lambda: None
    not_taken: frozenset[str] = frozenset()


VARIANTS = {
    DENSE: Variant(apply.dense),
    "tome": Variant(apply.tokenmerge, ToMeConfig, of_pipeline=True, merges=True),
    "tomesd": Variant(
        apply.tomesd,
        ToMeConfig,
        merges=True,
        missing=apply.tomesd_missing,
        not_taken=frozenset(field.name for field in dataclasses.fields(ToMeConfig)) - apply.TOMESD_SETTINGS,
    ),
    ORACLE: Variant(apply.oracle, ToMeConfig),
    # Dense with as many steps as fit into the time of a merged variant: how many is known after that one ran.
    FEWER_STEPS: Variant(apply.dense),
}


@dataclasses.dataclass(frozen=True)
class VariantSpec:
    """A variant with its settings.

    Args:
        name: of :data:`VARIANTS`.
        settings: name and value of those that differ from the defaults, and of the ratio.
    """

    name: str
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        """In words, such as ``"tome ratio=0.5"``."""
        return variant_label(self.name, dict(self.settings))

    def config(self) -> Any:
        """The configuration object; None for a variant without settings."""
        config_class = VARIANTS[self.name].config
        return None if config_class is None else config_class(**dict(self.settings))


def parse_variant(text: str, ratios: Sequence[float], defaults: Mapping[str, Any]) -> list[VariantSpec]:
    """Read ``NAME`` or ``NAME:SETTING=VALUE,…``; a setting that is a switch may stand without a value.

    Args:
        text: such as ``"tome:max_downsample=2,merge_mlp"``.
        ratios: one variant is made for each, unless the text says its own.
        defaults: values of settings that the text does not give.

    Raises:
        ConfigError: the name or a setting is unknown, or a value is out of range.

    >>> [spec.label for spec in parse_variant("tome:merge_mlp", [0.25, 0.5], {})]
    ['tome ratio=0.25 merge_mlp', 'tome ratio=0.5 merge_mlp']
    """
    name, _, rest = text.partition(":")
    if name not in VARIANTS:
        raise ConfigError(f"variant: expected one of {', '.join(VARIANTS)}, got {name!r}")
    variant = VARIANTS[name]
    config_class = variant.config
    if config_class is None:
        if rest:
            raise ConfigError(f"variant: {name} takes no settings, got {rest!r}")
        return [VariantSpec(name)]
    fields = {
        field.name: field.default
        for field in dataclasses.fields(config_class)
        if field.name not in variant.not_taken
    }
    given = {**defaults, **dict(_setting(item, fields, text) for item in rest.split(",") if item)}
    specs = []
    for ratio in [given["ratio"]] if "ratio" in given else ratios:
        settings = {**fields, **given, "ratio": float(ratio)}
        try:
            config_class(**settings)
        except ConfigError as error:
            raise ConfigError(f"variant {text}: {error}") from error
        # Without defaults, so that one variant has one name.
        shown = [item for item in settings.items() if item[0] == "ratio" or item[1] != fields[item[0]]]
        specs.append(VariantSpec(name, tuple(shown)))
    return specs


def _setting(item: str, fields: Mapping[str, Any], text: str) -> tuple[str, Any]:
    name, equals, value = (part.strip() for part in item.partition("="))
    if name not in fields:
        raise ConfigError(f"variant {text}: expected settings out of {', '.join(fields)}, got {name!r}")
    kind = type(fields[name])
    try:
        if kind is bool:
            return name, {"": True, "true": True, "false": False}[value.lower() if equals else ""]
        return name, kind(value)
    except (KeyError, ValueError) as error:
        wanted = "true or false" if kind is bool else f"a value of type {kind.__name__}"
        raise ConfigError(f"variant {text}: {name}: expected {wanted}, got {value!r}") from error
