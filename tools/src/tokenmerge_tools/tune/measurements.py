"""The measurements of a check. A look is one picture of one plan, drawn and timed in a round with dense."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from statistics import fmean, median, stdev

from tokenmerge.errors import ConfigError
from tokenmerge_tools.records.kinds import LOWER_IS_CLOSER, TuneRecord


@dataclasses.dataclass(frozen=True)
class Look:
    """One picture: number of its prompt and seed, times, and the value of the metric.

    ``cost`` is the wall-clock time since the previous look of the round. The first one includes dense.
    """

    name: str
    item: int
    seconds: float
    dense_seconds: float
    value: float
    cost: float = 0.0


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What some looks say of one plan: the median speed-up t_dense / t, and the mean value of the metric.

    ``error`` is the standard error of the mean; it is infinite for one look.
    """

    looks: int
    speedup: float
    value: float
    error: float


def estimates(looks: Iterable[Look]) -> dict[str, Estimate]:
    """Summarise the looks of each plan."""
    by_name: dict[str, list[Look]] = {}
    for look in looks:
        by_name.setdefault(look.name, []).append(look)
    return {
        name: Estimate(
            len(own),
            median(look.dense_seconds / look.seconds for look in own),
            *mean_and_error([look.value for look in own]),
        )
        for name, own in by_name.items()
    }


def gain(looks: Iterable[Look], best: str, rule: str, metric: str) -> tuple[float, float] | None:
    """Return how much closer a plan is than another on their common prompts, and the standard error.

    The result is None if they have no prompt in common. A positive number is closer, for each metric.
    """
    values: dict[str, dict[int, float]] = {best: {}, rule: {}}
    for look in looks:
        if look.name in values:
            values[look.name][look.item] = look.value
    sign = -1 if metric in LOWER_IS_CLOSER else 1
    common = values[best].keys() & values[rule]
    return mean_and_error([sign * (values[best][i] - values[rule][i]) for i in common]) if common else None


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of at least one number and its standard error, infinite for one.

    >>> mean_and_error([1.0]), mean_and_error([1.0, 3.0])
    ((1.0, inf), (2.0, 1.0))
    """
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def look_of(record: TuneRecord, metric: str) -> Look:
    """Return the look in a record."""
    values = record.values
    if metric not in values["metrics"]:
        raise ConfigError(f"{metric}: the record of {record.name} has no such metric; remove that line")
    seconds, dense_seconds, cost = (float(values[name]) for name in ("seconds", "dense_seconds", "cost"))
    return Look(record.name, record.item, seconds, dense_seconds, float(values["metrics"][metric]), cost)
