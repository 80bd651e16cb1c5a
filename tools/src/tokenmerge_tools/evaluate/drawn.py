"""The variants that are compared with dense, and the number of steps of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenmerge.errors import ConfigError
from tokenmerge_tools.records.file import read_records
from tokenmerge_tools.records.kinds import CellRecord, cell_of_pictures
from tokenmerge_tools.variants.variant import DENSE, FEWER_STEPS, VARIANTS, Variant, parse_variant

# Without the oracle, whose pictures are wrong.
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
    texts: Sequence[str], ratios: Sequence[float], max_downsample: int | None
) -> list[Variant]:
    """Read the variants to compare with dense, in order and each once."""
    defaults = {} if max_downsample is None else {"max_downsample": max_downsample}
    specs: list[Variant] = []
    for text in texts:
        name = text.partition(":")[0]
        if name not in (*CHOICES, DENSE):
            why = (
                "; the pictures of an oracle are wrong, so it is only for tokenmerge bench"
                if name in VARIANTS
                else ""
            )
            raise ConfigError(f"variant: expected some of {', '.join(CHOICES)}, got {name!r}{why}")
        if missing := VARIANTS[name].missing():
            raise ConfigError(f"variant {name}: {missing}; or leave it out")
        specs += parse_variant(text, ratios, defaults)
    found = list(dict.fromkeys(spec for spec in specs if spec.name != DENSE))
    if FEWER_STEPS in [spec.name for spec in found] and len(found) == 1:
        raise ConfigError("variant: fewer-steps needs a merged variant to compare with; give one too")
    return found


def plan_variants(
    specs: Sequence[Variant],
    steps: int,
    conditions: dict[str, Any],
    folder: Path,
    counted: Callable[[Variant], float | None],
) -> list[Drawn]:
    """List dense, then the variants, and then fewer steps for each of them, if requested.

    ``steps`` are those of dense, and ``conditions`` what all pictures have in common. A record of
    ``tokenmerge bench`` in ``folder`` may have the number of dense steps that fit into a variant's time. If
    there is none, ``counted`` returns the speed-up of a variant by counted operations.
    """
    merged = [spec for spec in specs if VARIANTS[spec.name].is_faster]
    drawn = [Drawn(Variant(DENSE), steps), *(Drawn(spec, steps) for spec in merged)]
    if len(merged) < len(specs):
        cells = [cell for file in sorted(folder.glob("*.jsonl")) for cell in read_records(file, CellRecord)]
        found = [one for one in (_fewer_steps(spec, cells, conditions, counted) for spec in merged) if one]
        if not found:
            raise ConfigError(
                f"variant fewer-steps: the number of steps that fit into the time of {merged[0].label} can "
                f"be neither counted nor found in {folder}; leave fewer-steps out, or first run tokenmerge "
                f"bench --scope pipeline -o {folder / 'bench.jsonl'} with the same model, size, steps and "
                "variants"
            )
        drawn += dict.fromkeys(one for one in found if one.steps < steps)
    return drawn


def _fewer_steps(
    merged: Variant,
    cells: Sequence[CellRecord],
    conditions: dict[str, Any],
    counted: Callable[[Variant], float | None],
) -> Drawn | None:
    """Plan dense with as many steps as fit into the time of a variant; None if that time is unknown."""
    timed = Variant(FEWER_STEPS, (("as", merged.label),))
    cell = cell_of_pictures(timed.label, conditions, [c for c in cells if "steps_used" in c.facts])
    if cell is not None:
        return Drawn(timed, cell.facts["steps_used"])
    speedup = counted(merged)
    if speedup is None:
        return None
    number = max(1, round(conditions["steps"] / speedup))
    return Drawn(Variant(FEWER_STEPS, (("steps", number),)), number)
