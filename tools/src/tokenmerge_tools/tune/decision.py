"""Decides which settings are the result, by a pure function of the measurements."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from tokenmerge_tools.tune.goal import Goal
from tokenmerge_tools.tune.measurements import Estimate, Look, estimates, paired


@dataclasses.dataclass(frozen=True)
class Decision:
    """The result of a search: the chosen setting, or the nearest one if none reaches the goal.

    It is ``sure`` if it reaches the goal by at least one standard error. ``ties`` are the other settings that
    are as good within the noise.
    """

    name: str
    reached: bool
    sure: bool
    ties: tuple[str, ...] = ()


def decide(looks: Sequence[Look], goal: Goal, preferred: Collection[str] = ()) -> Decision:
    """Choose settings by the rule of one standard error.

    Settings count if they reach the goal by at least one standard error. If none does, those count whose
    estimate reaches it and that have the most pictures. For a wanted speed, the best of them is the closest.
    For a wanted closeness, it is the fastest. Settings that are behind the best by no more than one standard
    error of the paired difference are ties. Among the best and its ties, a preferred setting is chosen, or
    else the one that is better in what the goal asks for.
    """
    found = estimates(looks)
    wants_speed = goal.speedup is not None
    sure = [one for one in found.values() if not misses(one, goal, errors=1)]
    reaching = sure or [one for one in found.values() if not misses(one, goal)]
    if not reaching:
        nearest = max(found.values(), key=lambda one: one.objectives(wants_speed)[0])
        return Decision(nearest.name, reached=False, sure=False)
    if not sure:  # a single picture may reach the goal by luck
        most = max(one.looks for one in reaching)
        reaching = [one for one in reaching if one.looks == most]
    best = max(reaching, key=lambda one: one.objectives(wants_speed)[2])
    of: dict[str, list[Look]] = {one.name: [] for one in reaching}
    for look in looks:
        if look.name in of:
            of[look.name].append(look)

    def is_tie(one: Estimate) -> bool:
        gap, error = paired(of[best.name], of[one.name], wants_speed)
        return one is best or (one.looks > 1 and gap <= error < float("inf"))

    ties = [one for one in reaching if is_tie(one)]
    chosen = max(ties, key=lambda one: (one.name in preferred, one.objectives(wants_speed)[0]))
    names = tuple(one.name for one in ties if one is not chosen)
    return Decision(chosen.name, reached=True, sure=bool(sure), ties=names)


def misses(one: Estimate, goal: Goal, errors: float = 0.0) -> bool:
    """Return whether a setting misses the goal by less than this number of standard errors.

    One that is not faster than dense misses every goal. For one or more errors, one picture is not enough.
    """
    value, error, _ = one.objectives(goal.speedup is not None)
    if goal.speedup is None and not one.speedup > 1:
        return True
    if not errors:
        return not value >= goal.least
    return one.looks < 2 or not value - errors * error >= goal.least
