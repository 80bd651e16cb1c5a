"""The settings that a search tries, from the method names and settings that a user could type."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from tokenmerge import presets
from tokenmerge.config import StepReuse, ToMeConfig
from tokenmerge_tools.evaluate.drawn import Drawn
from tokenmerge_tools.tune.goal import Goal
from tokenmerge_tools.tune.search import Entry
from tokenmerge_tools.variants.variant import FEWER_STEPS, VARIANTS, Variant, parse_variant

AUTO_FAMILY = "auto"

# Strong settings come first, because they are cheap to draw.
_RATIOS_OF_AUTO = (0.75, 0.7, 0.6, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1)
_RATIOS = (0.75, 0.5, 0.25)
_RATIOS_OF_PRESETS = (0.5, 0.3)
# Shares of the steps that are tried for a wanted closeness.
_SHARES_OF_STEPS = (0.3, 0.4, 0.5, 0.65, 0.8)

_TILED = "tome:planner=tiled,proportional,max_downsample=8"
_FALLING = _TILED + ',rules=[{{"until": 0.5, "ratio": 0.6}}, {{"start": 0.5, "ratio": 0.4}}],ratio={}'
# (family, its settings, strengths). Braces stand for the strength.
_FAMILIES: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    (AUTO_FAMILY, "auto:ratio={}", _RATIOS_OF_AUTO),
    # Step reuse alone.
    ("step reuse", "tome:ratio=0,max_downsample=8,reuse.every={}", (5, 4, 3, 2)),
    (
        "step reuse, finest level too",
        "tome:ratio=0,max_downsample=8,reuse.every={},reuse.shallow_every=2",
        (4, 2),
    ),
    (
        "step reuse, finest level late",
        "tome:ratio=0,max_downsample=8,reuse.every={},reuse.shallow_every=2,reuse.shallow_from=0.3",
        (4, 2),
    ),
    # Merging and step reuse.
    ("auto, full every 3rd step", "auto:reuse.every=3,ratio={}", (0.5, 0.25)),
    ("auto, full every 2nd step", "auto:reuse.every=2,ratio={}", (0.75, 0.5)),
    ("auto, no correction", "auto:correction.every=0,ratio={}", (0.4, 0.25)),
    # Other places of the full steps, and of those that skip the finest level.
    ("auto, full steps evenly spaced", "auto:reuse.ends=full,reuse.spacing=1,ratio={}", (0.5, 0.25)),
    ("auto, full steps late", "auto:reuse.ends=full,reuse.spacing=0.5,ratio={}", (0.5, 0.25)),
    ("auto, first half full", "auto:reuse.start=0.5,ratio={}", (0.5, 0.25)),
    ("auto, free ends", "auto:reuse.ends=free,ratio={}", (0.5, 0.25)),
    (
        "auto, finest level skipped late",
        "auto:reuse.shallow_from=0.5,reuse.shallow_until=0.9,ratio={}",
        (0.5, 0.4),
    ),
    # Merging alone.
    ("auto, no step reuse", "auto:reuse.every=1,ratio={}", _RATIOS),
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

    drawn: Drawn
    entry: Entry

    @property
    def name(self) -> str:
        """Name of the setting, unique in a search."""
        return self.entry.name


def candidates(goal: Goal, steps: int) -> list[Candidate]:
    """List what a search tries, in order: ``auto``, baselines, step reuse, merging, presets."""
    found = [_candidate(text, steps, family, strength) for family, text, strength in _merging()]
    number = len(_RATIOS_OF_AUTO)
    found[number:number] = _rivals(goal, steps)
    found += [
        _candidate(f"{name}:ratio={ratio}", steps, name, ratio)
        for ratio in _RATIOS_OF_PRESETS
        for name in presets.__all__
        if name != "todo"  # its ratio changes nothing
    ]
    found.append(_candidate("todo", steps, "todo", 0.75))
    return list({candidate.name: candidate for candidate in found}.values())


def in_force(config: ToMeConfig, steps: int, merges: bool) -> ToMeConfig | None:
    """Reduce settings to what they do in a generation of ``steps`` steps, so that equal ones are tried once.

    The result is None if they save nothing. ``merges`` says whether any token merges at this size.

    >>> in_force(ToMeConfig(ratio=0.5, reuse=StepReuse(every=4, span=0.2)), steps=4, merges=False) is None
    True
    """
    reuse = _reuse_in_force(config.reuse, steps)
    if merges:
        return dataclasses.replace(config, reuse=reuse)
    return ToMeConfig(ratio=0, reuse=reuse) if reuse.on else None


def _reuse_in_force(reuse: StepReuse, steps: int) -> StepReuse:
    if len(reuse.steps_of(steps).full) == steps:
        return StepReuse()
    span = reuse.span * steps
    every = max(1, min(reuse.every, int(span)))
    shallow_every = max(1, min(reuse.shallow_every, int(span / 2)))
    if shallow_every == 1:  # then it does not matter from where to where
        reuse = dataclasses.replace(reuse, shallow_every=1, shallow_from=0.0, shallow_until=1.0)
    return dataclasses.replace(reuse, every=every, shallow_every=shallow_every, span=1.0)


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
    return Candidate(Drawn(spec, steps), Entry(spec.label, family, strength, group))


def _rivals(goal: Goal, steps: int) -> list[Candidate]:
    """List fewer steps, and the block caches that are installed."""
    found = []
    for number in _numbers_of_steps(goal, steps):
        spec = Variant(FEWER_STEPS, (("steps", number),))
        entry = Entry(spec.label, FEWER_STEPS, -number, FEWER_STEPS, rival=True)
        found.append(Candidate(Drawn(spec, number), entry))
    for name, setting, values in (
        ("deepcache", "interval", (5, 3, 2)),
        ("first-block-cache", "threshold", (0.2, 0.1, 0.05)),
        ("cache-dit", "threshold", (0.2, 0.08)),
    ):
        if VARIANTS[name].missing() is None:
            for value in values:
                (spec,) = parse_variant(f"{name}:{setting}={value}", (), {})
                found.append(Candidate(Drawn(spec, steps), Entry(spec.label, name, value, name, rival=True)))
    return found


def _numbers_of_steps(goal: Goal, steps: int) -> list[int]:
    if goal.speedup is not None:
        # Encoding the prompt and decoding the picture take time too, so the larger number may be too slow.
        most = math.floor(steps / goal.speedup)
        wanted = {most, most - 1}
    else:
        wanted = {round(share * steps) for share in _SHARES_OF_STEPS}
    return sorted(number for number in wanted if 1 <= number < steps)
