"""The settings that a search tries, from the method names and settings that a user could type."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from tokenmerge import presets
from tokenmerge.config import StepReuse, ToMeConfig
from tokenmerge_tools.tune.goal import Goal
from tokenmerge_tools.tune.search import Entry
from tokenmerge_tools.variants.variant import FEWER_STEPS, VARIANTS, Variant, parse_variant

AUTO_FAMILY = "auto"

# Strong settings come first, because they are cheap to draw.
_SPEEDUPS = (4, 3.5, 3, 2.75, 2.5, 2.25, 2, 1.8, 1.6, 1.5, 1.4, 1.3, 1.2)
_RATIOS = (0.75, 0.5, 0.25)
_RATIOS_OF_PRESETS = (0.5, 0.3)
# Shares of the steps that are tried for a wanted closeness.
_SHARES_OF_STEPS = (0.3, 0.4, 0.5, 0.65, 0.8)

_TILED = "tome:planner=tiled,proportional,max_downsample=8"
_SHARED = _TILED + ",plans.blocks"
_FALLING = _TILED + ',rules=[{{"until": 0.5, "ratio": 0.6}}, {{"start": 0.5, "ratio": 0.4}}],ratio={}'
# (family, its settings, strengths). Braces stand for the strength.
_FAMILIES: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    (AUTO_FAMILY, "auto:speedup={}", _SPEEDUPS),
    # Step reuse alone.
    ("step reuse", "tome:ratio=0,max_downsample=8,reuse.every={}", (5, 4, 3, 2)),
    (
        "step reuse, finest level too",
        "tome:ratio=0,max_downsample=8,reuse.every={},reuse.shallow_every=2",
        (4, 2),
    ),
    # Merging and step reuse.
    ("tiled, every 3rd step", _SHARED + ",reuse.every=3,ratio={}", (0.6, 0.4)),
    ("tiled, every 2nd step", _SHARED + ",reuse.every=2,ratio={}", (0.6, 0.4)),
    ("tiled, every 2nd step, corrected", _SHARED + ",reuse.every=2,correction.every=2,ratio={}", (0.6, 0.4)),
    # Merging alone.
    ("tiled", _TILED + ",ratio={}", _RATIOS),
    (
        "tiled, first 70 % of the steps",
        _TILED + ',rules=[{{"start": 0.7, "ratio": 0}}],ratio={}',
        (0.75, 0.5),
    ),
    ("tiled, falling ratio", _FALLING, (0.5,)),
    ("blocks, corrected", _TILED + ",scope=block,correction.every=3,ratio={}", (0.75, 0.5)),
    (
        "blocks, first half of the steps",
        _TILED + ',scope=block,rules=[{{"start": 0.5, "ratio": 0}}],ratio={}',
        (0.75, 0.5),
    ),
    (
        "residuals of the model",
        "tome:features=model_residual,plans.blocks,proportional,max_downsample=8,ratio={}",
        (0.5, 0.25),
    ),
    ("keys", "tome:scope=keys,proportional,max_downsample=8,ratio={}", (0.75, 0.5)),
)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A setting to try, and what the search knows of it."""

    variant: Variant
    entry: Entry

    @property
    def name(self) -> str:
        """Name of the setting, unique in a search."""
        return self.entry.name


def candidates(goal: Goal, steps: int) -> list[Candidate]:
    """List what a search tries, in order: the default method, baselines, step reuse, merging, presets."""
    found = [_candidate(text, steps, family, strength) for family, text, strength in _merging()]
    number = len(_SPEEDUPS)
    found[number:number] = _rivals(goal, steps)
    found += [
        _candidate(f"{name}:ratio={ratio}", steps, name, ratio)
        for ratio in _RATIOS_OF_PRESETS
        for name in presets.__all__
        if name != "todo"  # its ratio changes nothing
    ]
    found.append(_candidate("todo", steps, "todo", 0.75))
    return list({candidate.name: candidate for candidate in found}.values())


def what_it_does(config: ToMeConfig, steps: int, merges: bool) -> object | None:
    """Return what settings do in a generation of ``steps`` steps, so that equal ones are tried once.

    The result is None if they save nothing. ``merges`` says whether any token merges at this size.

    >>> what_it_does(ToMeConfig(ratio=0.5, reuse=StepReuse(every=4)), steps=2, merges=False) is None
    True
    """
    runs = config.reuse.steps_of(steps)
    if not merges:
        return None if len(runs.full) == steps else runs
    return dataclasses.replace(config, reuse=StepReuse()), runs


def _merging() -> Iterator[tuple[str, str, float]]:
    for family, text, strengths in _FAMILIES:
        for strength in strengths:
            yield family, text.format(strength), strength


def _candidate(text: str, steps: int, family: str, strength: float) -> Candidate:
    # presets.tomesd becomes the variant "tome", since the variant "tomesd" is the package of that name.
    if text.startswith("tomesd:"):
        text = text.replace("tomesd:", "tome:plans.guidance=false,", 1)
    (spec,) = parse_variant(text, [ToMeConfig.ratio], {})
    group = AUTO_FAMILY if family == AUTO_FAMILY else ""
    return Candidate(spec, Entry(spec.label, family, strength, group))


def _rivals(goal: Goal, steps: int) -> list[Candidate]:
    """List fewer steps, and the block caches that are installed."""
    found = []
    for number in _numbers_of_steps(goal, steps):
        spec = Variant(FEWER_STEPS, (("steps", number),))
        entry = Entry(spec.label, FEWER_STEPS, -number, FEWER_STEPS, rival=True)
        found.append(Candidate(spec, entry))
    for name, setting, values in (
        ("deepcache", "interval", (5, 3, 2)),
        ("first-block-cache", "threshold", (0.2, 0.1, 0.05)),
        ("cache-dit", "threshold", (0.2, 0.08)),
    ):
        if VARIANTS[name].missing() is None:
            for value in values:
                (spec,) = parse_variant(f"{name}:{setting}={value}", (), {})
                found.append(Candidate(spec, Entry(spec.label, name, value, name, rival=True)))
    return found


def _numbers_of_steps(goal: Goal, steps: int) -> list[int]:
    if goal.speedup is not None:
        # Encoding the prompt and decoding the picture take time too, so the larger number may be too slow.
        most = math.floor(steps / goal.speedup)
        wanted = {most, most - 1}
    else:
        wanted = {round(share * steps) for share in _SHARES_OF_STEPS}
    return sorted(number for number in wanted if 1 <= number < steps)
