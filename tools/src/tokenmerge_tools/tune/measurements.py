"""The measurements of a run. A look is one picture of one setting, drawn and timed in a round with dense."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from statistics import fmean, median, stdev

from tokenmerge.errors import ConfigError
from tokenmerge_tools.records.kinds import TuneRecord
from tokenmerge_tools.tune.goal import Goal

# Assumed relative standard deviation of one timing, until a setting was timed twice.
_NOISE = 0.1
# The standard error of the median of a normal sample, divided by that of its mean.
_OF_MEDIAN = math.sqrt(math.pi / 2)


@dataclasses.dataclass(frozen=True)
class Look:
    """One picture of one setting: number of its prompt and seed, times, and closeness (larger is closer).

    ``cost`` is the wall-clock time since the previous look of the round. The first one includes dense.
    """

    name: str
    item: int
    seconds: float
    dense_seconds: float
    closeness: float
    cost: float = 0.0

    @property
    def log_speedup(self) -> float:
        """Logarithm of the speed-up."""
        return math.log(self.dense_seconds / self.seconds)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What is known of one setting from a number of looks, with standard errors.

    The speed-up is the median of t_dense / t over the rounds. The closeness is a mean; its error is infinite
    for one look.
    """

    name: str
    looks: int
    speedup: float
    speedup_error: float
    closeness: float
    closeness_error: float

    def objectives(self, wants_speed: bool) -> tuple[float, float, float]:
        """Return the value that has to reach the goal, its standard error, and the value that decides."""
        if wants_speed:
            return self.speedup, self.speedup_error, self.closeness
        return self.closeness, self.closeness_error, self.speedup


def estimates(looks: Iterable[Look]) -> dict[str, Estimate]:
    """Summarise the looks of each setting.

    The relative noise of a timing is a property of the machine. It is pooled over all settings, since each of
    them has too few timings.
    """
    by_name: dict[str, list[Look]] = {}
    for look in looks:
        by_name.setdefault(look.name, []).append(look)
    noise = _timing_noise(list(by_name.values()))
    found = {}
    for name, own in by_name.items():
        speedup = math.exp(median(look.log_speedup for look in own))
        spread = noise / math.sqrt(len(own)) * (_OF_MEDIAN if len(own) > 2 else 1.0)
        values = [look.closeness for look in own]
        error = stdev(values) / math.sqrt(len(own)) if len(own) > 1 else math.inf
        found[name] = Estimate(name, len(own), speedup, speedup * spread, fmean(values), error)
    return found


def _timing_noise(groups: Sequence[Sequence[Look]]) -> float:
    squares, freedom = 0.0, 0
    for own in groups:
        logs = [look.log_speedup for look in own]
        middle = fmean(logs)
        squares += sum((log - middle) ** 2 for log in logs)
        freedom += len(logs) - 1
    return math.sqrt(squares / freedom) if freedom else _NOISE


def paired(better: Sequence[Look], other: Sequence[Look], wants_speed: bool) -> tuple[float, float]:
    """Return the mean difference between two settings over their common rounds, and its standard error.

    For a wanted speed, closeness is compared, otherwise the logarithm of the speed-up. The error is infinite
    for fewer than two common rounds.
    """
    name = "closeness" if wants_speed else "log_speedup"
    others = {look.item: getattr(look, name) for look in other}
    gaps = [getattr(look, name) - others[look.item] for look in better if look.item in others]
    if len(gaps) < 2:
        return (gaps[0] if gaps else 0.0), math.inf
    return fmean(gaps), stdev(gaps) / math.sqrt(len(gaps))


def look_of(record: TuneRecord, goal: Goal) -> Look:
    """Return the look in a record, with the closeness that the goal asks for."""
    values = record.values
    if goal.metric not in values["metrics"]:
        raise ConfigError(f"{goal.metric}: the record of {record.name} has no such metric; remove that line")
    closeness = goal.closeness(float(values["metrics"][goal.metric]))
    seconds, dense_seconds, cost = (float(values[name]) for name in ("seconds", "dense_seconds", "cost"))
    return Look(record.name, record.item, seconds, dense_seconds, closeness, cost)
