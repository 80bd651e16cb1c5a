"""The results file of a search: the resolved settings, and one line for each look."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenmerge.errors import ConfigError
from tokenmerge_tools.records.file import read_records
from tokenmerge_tools.records.kinds import key_of
from tokenmerge_tools.tune.goal import Goal
from tokenmerge_tools.tune.measurements import Look

KIND = "tune"


@dataclasses.dataclass(frozen=True)
class TuneRecord:
    """One line of the results file.

    Args:
        conditions: key of everything that the measurement depends on, except the setting and the item.
        about: ``"look"``: one picture; ``"settings"``: all settings that a name stands for on this model and
            device; ``"counted"``: the speed-up by counted operations, and the seconds that
            counting took.
        name: name of the setting.
        item: number of the prompt and seed; −1 for a record that is not of a picture.
        values: the results, in JSON-compatible values.
    """

    conditions: str
    about: str
    name: str
    item: int
    values: Mapping[str, Any]

    @property
    def key(self) -> str:
        """A key of the measurement; a later record replaces an earlier one with the same key."""
        return key_of({name: getattr(self, name) for name in ("conditions", "about", "name", "item")})

    def to_line(self) -> str:
        """One line of JSON, its newline included."""
        return json.dumps({"kind": KIND, **dataclasses.asdict(self)}, ensure_ascii=False) + "\n"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TuneRecord:
        """Read what :meth:`to_line` wrote.

        Raises:
            ConfigError: it is not such a record.
        """
        try:
            record = cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)})
            if record.about == "look":
                numbers = [float(record.values[name]) for name in ("seconds", "dense_seconds")]
                if not min(numbers) > 0:
                    raise ValueError(f"expected seconds above 0, got {min(numbers)}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"not a record of tokenmerge tune ({error!r}); remove that line") from error
        return record


def read_tune_records(path: Path) -> Iterator[TuneRecord]:
    """Read the records of a file, in order. Lines of other kinds are skipped.

    Raises:
        ConfigError: the file cannot be read, or a line is not a valid record.
    """
    return read_records(path, {KIND: TuneRecord})


def look_of(record: TuneRecord, goal: Goal) -> Look:
    """The look in a record, with the closeness that the goal asks for.

    Raises:
        ConfigError: the record has no such metric.
    """
    values = record.values
    if goal.metric not in values["metrics"]:
        raise ConfigError(f"{goal.metric}: the record of {record.name} has no such metric; remove that line")
    return Look(
        record.name,
        record.item,
        float(values["seconds"]),
        float(values["dense_seconds"]),
        goal.closeness(float(values["metrics"][goal.metric])),
        float(values["cost"]),
    )
