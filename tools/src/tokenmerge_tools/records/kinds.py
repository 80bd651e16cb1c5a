"""The record of one benchmark cell, as an object and as a line of JSON."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from tokenmerge.config import with_new_names
from tokenmerge.errors import ConfigError

KIND = "bench"
STATUSES = ("ok", "oom", "unavailable", "error")

_DENSE = "dense"
_DENSE_SAME_ATTENTION = "dense, same attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CellRecord:
    """One cell: a variant at one setting on one machine.

    Attributes:
        conditions: everything that the results depend on. Cells with equal conditions are the same cell.
        status: ``"ok"``; ``"oom"``: out of memory; ``"unavailable"``: it cannot run on this machine or model;
            ``"error"``: it failed, and the next run tries it again.
        message: the reason for the status; empty for ``"ok"``.
        seconds: wall-clock time of each timed call, in the order in which they ran.
        peak_bytes: peak memory over these calls; None if it cannot be read.
        references: seconds of dense runs in the same rounds, by name: ``"dense"`` with fused attention, and
            ``"dense, same attention"`` with the attention of this cell.
        facts: other results, such as ``flops_dense`` or ``notes``.
        finished: date and time at which the cell was finished, in ISO 8601 with the UTC offset.
    """

    conditions: Mapping[str, Any]
    status: str
    message: str = ""
    seconds: tuple[float, ...] = ()
    peak_bytes: int | None = None
    references: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    finished: str = ""

    @property
    def key(self) -> str:
        """A key of the cell, equal for equal conditions."""
        return key_of(self.conditions)

    @property
    def label(self) -> str:
        """The variant with its settings, such as ``"tome ratio=0.5"``."""
        return variant_label(self.conditions["variant"], self.conditions["settings"])

    @property
    def median(self) -> float | None:
        """Median seconds of a call; None if it was not timed."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def iqr(self) -> tuple[float, float] | None:
        """First and third quartile of the seconds; None if it was not timed."""
        return median_and_iqr(self.seconds)[1] if self.seconds else None

    @property
    def speedup(self) -> float | None:
        """t_dense / t, where dense has fused attention and ran in the same rounds; None if not timed."""
        return self._over(_DENSE)

    @property
    def speedup_same_attention(self) -> float | None:
        """t_dense / t, where dense runs with the attention of this cell: the gain of merging alone."""
        return self._over(_DENSE_SAME_ATTENTION)

    def _over(self, reference: str) -> float | None:
        dense = self.references.get(reference)
        return statistics.median(dense) / statistics.median(self.seconds) if dense and self.seconds else None

    def to_line(self) -> str:
        """One line of JSON, its newline included.

        Raises:
            ValueError: a value is NaN or infinite.
        """
        values = {"kind": KIND, "key": self.key, **dataclasses.asdict(self)}
        return json.dumps(values, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CellRecord:
        """Make a record from the parsed JSON of :meth:`to_line`.

        Raises:
            ConfigError: the values are not those of a record.
        """
        try:
            conditions = values["conditions"]
            record = cls(
                conditions={**conditions, "settings": with_new_names(conditions["settings"])},
                status=values["status"],
                message=values["message"],
                seconds=tuple(map(float, values["seconds"])),
                peak_bytes=values["peak_bytes"],
                references={name: tuple(map(float, times)) for name, times in values["references"].items()},
                facts=dict(values["facts"]),
                finished=values["finished"],
            )
            known = record.status in STATUSES and bool(record.label)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigError(f"not a record of tokenmerge bench: {error!r}") from error
        if not known:
            raise ConfigError(f"status: expected one of {', '.join(STATUSES)}, got {record.status!r}")
        if record.status == "ok" and not record.seconds:
            raise ConfigError("seconds: expected at least one for status ok, got none; remove that line")
        timings = (record.seconds, *record.references.values())
        wrong = [time for times in timings for time in times if not (isfinite(time) and time > 0)]
        if wrong:
            raise ConfigError(f"seconds: expected times above 0, got {wrong[0]}; remove that line")
        return record


def key_of(conditions: Mapping[str, Any]) -> str:
    """A key for conditions in any order: the first 16 hexadecimal digits of their SHA-256 hash.

    >>> key_of({"a": 1, "b": [2]}) == key_of({"b": [2], "a": 1})
    True
    """
    text = json.dumps(conditions, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def median_and_iqr(seconds: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Median, and first and third quartile, of at least one number.

    >>> median_and_iqr([4.0, 1.0, 2.0, 3.0, 5.0])
    (3.0, (2.0, 4.0))
    """
    if len(seconds) == 1:
        return seconds[0], (seconds[0], seconds[0])
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return middle, (low, high)


def variant_label(variant: str, settings: Mapping[str, Any]) -> str:
    """The name of a variant with its settings.

    >>> variant_label("tome", {"ratio": 0.5, "merge_mlp": True})
    'tome ratio=0.5 merge_mlp'
    >>> variant_label("fewer-steps", {"as": "tome ratio=0.5"})
    'fewer-steps (tome ratio=0.5)'
    """
    if set(settings) == {"as"}:
        return f"{variant} ({settings['as']})"
    words = [name if value is True else f"{name}={_short(value)}" for name, value in settings.items()]
    return " ".join([variant, *words])


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
