"""The variants that are compared with dense, and the number of steps of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from tokenmerge.errors import ConfigError
from tokenmerge_tools.variants.variant import DENSE, FEWER_STEPS, VARIANTS, Variant, parse_variant

CHOICES = (*(name for name, variant in VARIANTS.items() if variant.is_faster), FEWER_STEPS)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A variant that pictures are drawn with."""

    spec: Variant
    steps: int

    @property
    def label(self) -> str:
        """The variant with its settings, such as ``"tome ratio=0.5"``."""
        return self.spec.label


def parse_variants(
    texts: Sequence[str], ratios: Sequence[float], max_downsample: int | None, speedups: Sequence[float]
) -> list[Variant]:
    """Read the variants to compare with dense, in order and each once."""
    defaults = {} if max_downsample is None else {"max_downsample": max_downsample}
    specs: list[Variant] = []
    for text in texts:
        name = text.partition(":")[0]
        if name not in (*CHOICES, DENSE):
            raise ConfigError(f"variant: expected some of {', '.join(CHOICES)}, got {name!r}")
        if missing := VARIANTS[name].missing():
            raise ConfigError(f"variant {name}: {missing}; or leave it out")
        specs += parse_variant(text, ratios, defaults, speedups)
    found = list(dict.fromkeys(spec for spec in specs if spec.name != DENSE))
    if FEWER_STEPS in [spec.name for spec in found] and len(found) == 1:
        raise ConfigError("variant: fewer-steps needs a merged variant to compare with; give one too")
    return found


def plan_variants(
    specs: Sequence[Variant], steps: int, counted: Callable[[Variant], float | None]
) -> list[Drawn]:
    """List dense, then the variants, and then fewer steps for each of them, if requested.

    ``steps`` are those of dense. ``counted`` returns the speed-up of a variant by counted operations; None if
    they cannot be counted.
    """
    merged = [spec for spec in specs if VARIANTS[spec.name].is_faster]
    drawn = [Drawn(Variant(DENSE), steps), *(Drawn(spec, steps) for spec in merged)]
    if len(merged) < len(specs):
        speedups = [speedup for speedup in map(counted, merged) if speedup is not None]
        if not speedups:
            raise ConfigError(
                f"variant fewer-steps: the operations of {merged[0].label} cannot be counted here, and the "
                "number of steps is unknown; leave fewer-steps out, or add a method such as auto"
            )
        numbers = dict.fromkeys(max(1, round(steps / speedup)) for speedup in speedups)
        drawn += [Drawn(Variant(FEWER_STEPS, (("steps", n),)), n) for n in numbers if n < steps]
    return drawn
