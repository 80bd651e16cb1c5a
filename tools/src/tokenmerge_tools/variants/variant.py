"""The variants that a benchmark compares."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from tokenmerge.config import SETTINGS, ToMeConfig, flat
from tokenmerge.errors import ConfigError
from tokenmerge_tools.method_spec import (
    AUTO,
    DEFAULT_SPEEDUP,
    METHODS,
    OF_AUTO,
    SPEEDUP,
    MethodSpec,
    as_plain,
    read_setting,
)
from tokenmerge_tools.records.kinds import variant_label
from tokenmerge_tools.variants import contexts
from tokenmerge_tools.variants.rivals import RIVALS, VariantKind

DENSE = "dense"
FEWER_STEPS = "fewer-steps"
EVERY_RIVAL = "rivals"
EVERY_SETTING = "all"

# A comma between settings. A comma within JSON does not match, because a quote follows it.
_COMMA = re.compile(r",(?=\s*[A-Za-z_])")

_OTHER_METHODS = [method for method in METHODS if method != AUTO and method not in RIVALS]

VARIANTS = {
    DENSE: VariantKind(contexts.dense),
    AUTO: VariantKind(contexts.tokenmerge, AUTO, is_faster=True, takes=OF_AUTO),
    **{method: VariantKind(contexts.tokenmerge, method, is_faster=True) for method in _OTHER_METHODS},
    **RIVALS,
    # The dense model, in the number of steps that needs as many operations as a merged variant.
    FEWER_STEPS: VariantKind(contexts.dense),
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """A variant with its settings.

    The settings are the ratio and those that differ from the method's defaults, with plain values as
    :func:`tokenmerge_tools.method_spec.as_plain` makes them.
    """

    name: str
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        """The variant with its settings, such as ``"tome ratio=0.5"``."""
        return variant_label(self.name, dict(self.settings))

    def steps(self, dense: int) -> int:
        """Return its number of steps, if dense takes ``dense`` steps. Only ``fewer-steps`` takes fewer."""
        return int(dict(self.settings)["steps"]) if self.name == FEWER_STEPS else dense

    @property
    def merging(self) -> MethodSpec | None:
        """The method and its changed settings, or None for a variant without settings."""
        method = VARIANTS[self.name].method
        return None if method is None else MethodSpec(method, dict(map(_read, self.settings)))

    def apply(self, pipe_or_model: Any, config: ToMeConfig | None) -> AbstractContextManager[Any]:
        """Apply the variant to a pipeline or a denoiser within the context."""
        variant = VARIANTS[self.name]
        merging = self.merging
        if merging is not None and merging.is_default_method and not isinstance(pipe_or_model, nn.Module):
            return contexts.tokenmerge(pipe_or_model, config, speedup=merging.speedup)
        numbers = {} if variant.number is None else dict(self.settings)
        return variant.apply(pipe_or_model, config, **numbers)

    def config(self, pipe_or_model: object = None, **generation: Any) -> ToMeConfig | None:
        """Return the configuration, or None for a variant without settings. See :meth:`MethodSpec.config`."""
        return None if self.merging is None else self.merging.config(pipe_or_model, **generation)


def parse_variant(
    text: str, ratios: Sequence[float], speedups: Sequence[float] = (DEFAULT_SPEEDUP,)
) -> list[Variant]:
    """Read ``NAME`` or ``NAME:SETTING=VALUE,…``, with settings as :func:`read_setting` reads them.

    There is one variant for each ratio, or for each speed-up in the case of ``auto``, unless the text sets
    this value or the planner ignores it. ``RIVAL:all`` is a rival with each value of its ladder, and
    ``rivals`` or ``rivals:all`` every rival.

    >>> [spec.label for spec in parse_variant("tome:merge_mlp", [0.25, 0.5])]
    ['tome ratio=0.25 merge_mlp', 'tome ratio=0.5 merge_mlp']
    """
    name, _, rest = text.partition(":")
    if name == EVERY_RIVAL and rest in ("", EVERY_SETTING):
        found: list[Variant] = []
        for one in RIVALS:
            found += parse_variant(f"{one}:{rest}" if RIVALS[one].ladder else one, ratios, speedups)
        return found
    if name not in VARIANTS:
        raise ConfigError(f"variant: expected one of {', '.join(VARIANTS)}, got {name!r}")
    variant = VARIANTS[name]
    if variant.number is not None and rest == EVERY_SETTING:
        return [Variant(name, ((variant.number[0], float(value)),)) for value in variant.ladder]
    if variant.number is not None:
        return [Variant(name, _read_values(name, rest, variant.number, variant.options))]
    if variant.method is None:
        if rest:
            raise ConfigError(f"variant: {name} takes no settings, got {rest!r}")
        return [Variant(name)]
    try:
        items = [read_setting(item, variant.takes) for item in _COMMA.split(rest.rstrip(", ")) if item]
        given = dict(items)
        method = MethodSpec(variant.method)
        defaults = flat(vars(ToMeConfig() if method.needs_model else method.config()))
        amount = SPEEDUP if method.needs_model else "ratio"
        amounts = speedups if method.needs_model else ratios
        if given.get("planner", defaults["planner"]) == "uniform":
            amounts = [defaults["ratio"]]
        specs = []
        for number in [given[amount]] if amount in given else amounts:
            changes = {**given, amount: float(number)}
            MethodSpec(variant.method, changes)
            shown = []
            for setting in (SPEEDUP, *SETTINGS):
                if setting not in changes:
                    continue
                # The method's defaults are left out, so that equal variants have equal names.
                if setting == amount or method.needs_model or changes[setting] != defaults[setting]:
                    shown.append((setting, as_plain(changes[setting])))
            specs.append(Variant(name, tuple(shown)))
    except ConfigError as error:
        raise ConfigError(f"variant {text}: {error}") from error
    return specs


def _read_values(
    variant: str, text: str, number: tuple[str, float], options: Mapping[str, float | str]
) -> tuple[tuple[str, Any], ...]:
    """Read ``NAME=VALUE,…``: the given options, and the number or its default."""
    name, default = number
    given = [item.partition("=")[::2] for item in text.split(",") if item.strip()]
    found = {key.strip(): value.strip() for key, value in given}
    values: dict[str, Any] = {}
    for key, example in {**options, name: default}.items():
        if key in found:
            values[key] = found[key] if isinstance(example, str) else _above_0(found[key])
    if set(found) - set(values) or None in values.values():
        also = ""
        if options:
            examples = ", ".join(f"{key}={_plain(example)}" for key, example in options.items())
            also = f" (optionally with any of {examples}, separated by commas)"
        raise ConfigError(
            f"variant: expected {variant}:{name}=NUMBER above 0, such as {name}={default:g}{also}, "
            f"got {text!r}"
        )
    return *((key, values[key]) for key in options if key in values), (name, values.get(name, float(default)))


def _above_0(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < math.inf else None


def _plain(example: float | str) -> str:
    return example if isinstance(example, str) else f"{example:g}"


def _read(item: tuple[str, Any]) -> tuple[str, Any]:
    name, value = item
    return read_setting(f"{name}={value}") if isinstance(value, str) else item
