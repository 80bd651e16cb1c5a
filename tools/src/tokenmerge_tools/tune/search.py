"""Chooses the next round, by a pure function of the measurements so far.

The search is successive halving (Jamieson and Talwalkar 2016, arXiv 1502.07943) with a third of the settings
left each time. All settings draw the first prompt, cheap ones first, except those that cannot reach the goal.
The best third goes on to the second prompt, a third of these to the third and fourth, and so on. Settings
that may be the best within the noise go on too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from statistics import median

from tokenmerge_tools.tune.decision import misses
from tokenmerge_tools.tune.goal import Goal
from tokenmerge_tools.tune.measurements import Estimate, Look, estimates

# Counted operations only estimate the time. A setting may be faster than its count by this factor.
_SLACK = 1.25
# One timing may be off by this factor.
_TIMING = 1.15
# Share of the budget after which no new setting is tried.
_FIRST_LOOKS = 0.5
# Largest number of settings in a round of the first prompt.
_TOGETHER = 6
# Settings that go on to the next prompt, at least.
_FEWEST = 3


@dataclasses.dataclass(frozen=True)
class Entry:
    """A setting as the search sees it.

    Settings of one family differ only in strength; a larger one is faster and less close. The best setting of
    each group always goes on. A rival is a baseline, only shown for comparison; it takes no place of others.
    """

    name: str
    family: str
    strength: float = 0.0
    group: str = ""
    rival: bool = False


@dataclasses.dataclass(frozen=True)
class Round:
    """Settings that draw one prompt and seed, by its number, beside dense."""

    item: int
    names: tuple[str, ...]


def next_round(
    entries: Sequence[Entry],
    looks: Sequence[Look],
    goal: Goal,
    budget: float,
    items: int,
    counted: Mapping[str, float],
) -> Round | None:
    """Choose what to measure next; None if the search is over.

    ``entries`` are all settings in the order in which they are tried, ``budget`` the seconds that all looks
    may cost, ``items`` the number of prompts and seeds, and ``counted`` the known speed-ups by operations.
    The first round has a setting that can be the result, whatever it costs.
    """
    own = [entry.name for entry in entries if not entry.rival]
    if own and not {look.name for look in looks} & set(own):
        return Round(0, (own[0],))
    left = budget - sum(look.cost for look in looks)
    looked = {look.name for look in looks}
    first = sum(look.cost for look in looks if look.item == 0)
    untried = [
        entry
        for entry in entries
        if entry.name not in looked and not hopeless(entry, entries, looks, goal, counted)
    ]
    if first >= _FIRST_LOOKS * budget:  # only one baseline of each group that has none yet
        shown = {entry.group for entry in entries if entry.name in looked}
        rivals = {entry.group: entry for entry in untried if entry.rival and entry.group not in shown}
        untried = list(rivals.values())
    if untried:
        names = tuple(entry.name for entry in untried[:_TOGETHER])
        return _fitting(Round(0, names), looks, left)
    alive = [entry for entry in entries if entry.name in looked]
    begin = 1
    while begin < items:
        end = min(2 * begin, items)
        alive = survivors(alive, [look for look in looks if look.item < begin], goal)
        for item in range(begin, end):
            measured = {look.name for look in looks if look.item == item}
            if names := tuple(entry.name for entry in alive if entry.name not in measured):
                return _fitting(Round(item, names), looks, left)
        begin = end
    return None


def hopeless(
    entry: Entry, entries: Sequence[Entry], looks: Sequence[Look], goal: Goal, counted: Mapping[str, float]
) -> bool:
    """Return whether a setting that was not tried cannot be the result.

    A setting that saves no operations cannot. For a wanted speed, a setting cannot if its counted operations,
    or a stronger setting of its family, show that it is too slow. For a wanted closeness, it cannot if they
    show that it is slower than two others that reach the goal. There must be two, because a single one may
    reach the goal only for this prompt.
    """
    found = estimates(looks)
    kin = [e.name for e in entries if e.family == entry.family and e.strength >= entry.strength]
    stronger = [found[name] for name in kin if name in found]
    count = counted.get(entry.name, math.inf)
    if count <= 1:
        return True
    if goal.speedup is not None:
        return count * _SLACK < goal.speedup or any(one.speedup * _TIMING < goal.speedup for one in stronger)
    rivals = {e.name for e in entries if e.rival}
    speeds = [one.speedup for one in found.values() if one.name not in rivals and not misses(one, goal)]
    second = sorted(speeds)[-2] if len(speeds) > 1 else 0.0
    return count * _SLACK < second or sum(not misses(one, goal) for one in stronger) > 1


def survivors(entries: Sequence[Entry], looks: Sequence[Look], goal: Goal) -> list[Entry]:
    """Return the best third of the settings, at least three, the best of each group, and close calls."""
    measured = estimates(looks)
    found = [measured[entry.name] for entry in entries if entry.name in measured]
    order = ranking(found, goal)
    by_name = {entry.name: entry for entry in entries}
    own = [name for name in order if not by_name[name].rival]
    kept = set(own[: max(_FEWEST, math.ceil(len(own) / 3))])
    kept |= _close_calls([one for one in found if not by_name[one.name].rival], goal)
    for group in {by_name[name].group for name in order}:
        kept.add(next(name for name in order if by_name[name].group == group))
    return [by_name[name] for name in order if name in kept]


def ranking(found: Sequence[Estimate], goal: Goal) -> list[str]:
    """Return the names of settings, the most promising first.

    Those that reach the goal are ordered by closeness for a wanted speed, and by speed for a wanted
    closeness. After every two of them comes one that misses the goal, the nearest first, since few prompts
    can mislead. Settings that miss the goal and are no better than another one in both come last.
    """
    by_value = sorted(found, key=lambda one: -one.objectives(goal.speedup is not None)[0])
    by_other = sorted(found, key=lambda one: -one.objectives(goal.speedup is not None)[2])
    missing = [one for one in by_value if misses(one, goal)]
    hopeful = [one for one in missing if not any(_dominates(other, one) for other in found)]
    order: list[Estimate] = []
    ahead, behind = [one for one in by_other if one not in missing], hopeful
    while ahead or behind:
        order += ahead[:2] + behind[:1]
        ahead, behind = ahead[2:], behind[1:]
    order += [one for one in missing if one not in hopeful]
    return [one.name for one in order]


def _close_calls(found: Sequence[Estimate], goal: Goal) -> set[str]:
    """Name the settings that miss the goal by at most one standard error, and may be the best ones.

    They are better than those that surely reach it: closer for a wanted speed, faster for a wanted closeness.
    """
    values = {one.name: one.objectives(goal.speedup is not None) for one in found}
    sure = [other for value, error, other in values.values() if value - error >= goal.least]
    best = max(sure, default=-math.inf)
    return {
        name
        for name, (value, error, other) in values.items()
        if value < goal.least <= value + error < math.inf and other > best
    }


def _dominates(one: Estimate, other: Estimate) -> bool:
    as_good = one.speedup >= other.speedup and one.closeness >= other.closeness
    return as_good and (one.speedup, one.closeness) != (other.speedup, other.closeness)


def _fitting(wanted: Round, looks: Sequence[Look], left: float) -> Round | None:
    """Cut a round to the time left. The first round of a search is always one setting."""
    if not looks:
        return Round(wanted.item, wanted.names[:1])
    dense = median(look.dense_seconds for look in looks)
    cost, names = dense, []
    for name in wanted.names:
        cost += median([look.seconds for look in looks if look.name == name] or [dense])
        if cost > left:
            break
        names.append(name)
    return Round(wanted.item, tuple(names)) if names else None
