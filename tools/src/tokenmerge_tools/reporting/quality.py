"""Records of an evaluation: quality metrics of a variant, and pairs of pictures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from tokenmerge.config import with_new_names
from tokenmerge.errors import ConfigError
from tokenmerge_tools.records.file import read_records
from tokenmerge_tools.records.kinds import key_of, variant_label

_TIMES = ("speedup", "speedup_quartiles")

# Metrics that are lower for closer pictures.
LOWER_IS_CLOSER = frozenset({"lpips", "fid", "kid", "motion-error"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class QualityRecord:
    """Quality metrics of one variant, such as its closeness to dense, over many pictures.

    Attributes:
        model: the model, as in benchmark records.
        width: width of the pictures in pixels.
        height: height of the pictures in pixels.
        variant: name of the variant, such as ``"tome"``.
        settings: the ratio, and the settings that differ from the variant's defaults.
        figures: value of each metric, such as ``{"psnr": 24.1, "ssim": 0.83}``; finite numbers.
        images: number of pictures, ≥ 1.
        category: category of the prompts. None: all prompts.
        conditions: everything else that the pictures depend on, in JSON-compatible values. ``steps`` is the
            number of steps of dense.
        speedup: t_dense / t of a picture, median over the pictures; None: unknown.
        speedup_quartiles: first and third quartiles of t_dense / t; None: unknown.
        steps_used: number of steps of ``"fewer-steps"``. None: as many as dense.
        measured_with: network and reference pictures of each metric that has them.
        config: all settings that the pictures were drawn with, including those that the method chose, in the
            form that :meth:`tokenmerge.ToMeConfig.from_dict` takes. None: unknown, or the variant has none.
        notes: remarks for the reader.
        finished: date and time of the measurement, in ISO 8601 with the UTC offset; "" if unknown.
    """

    model: str
    width: int
    height: int
    variant: str
    settings: Mapping[str, Any]
    figures: Mapping[str, float]
    images: int
    category: str | None = None
    conditions: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    speedup: float | None = None
    speedup_quartiles: tuple[float, float] | None = None
    steps_used: int | None = None
    measured_with: Mapping[str, str] = dataclasses.field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    finished: str = dataclasses.field(default="", compare=False)

    @property
    def label(self) -> str:
        """The variant with its settings."""
        return variant_label(self.variant, self.settings)

    @property
    def drawn_with(self) -> dict[str, Any]:
        """Everything that the pictures depend on, including the model and the size."""
        return {"model": self.model, "width": self.width, "height": self.height, **self.conditions}

    @property
    def key(self) -> str:
        """A key that is equal for metrics of the same pictures. A later record replaces earlier ones."""
        values = dataclasses.asdict(self)
        for name in (*_TIMES, "figures", "measured_with", "config", "notes", "finished"):
            del values[name]
        return key_of(values)

    def to_line(self) -> str:
        """One line of JSON, its newline included. A file may mix all kinds of records."""
        return _line("quality", self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> QualityRecord:
        """Read what :meth:`to_line` wrote.

        Raises:
            ConfigError: it is not such a record.
        """
        # Older records lack the date, the number of steps, the times and the chosen settings.
        later = {"finished": "", **dict.fromkeys(("steps_used", "config", *_TIMES))}
        record = _read(cls, {**later, **values})
        if record.speedup_quartiles is not None:
            record = dataclasses.replace(record, speedup_quartiles=tuple(record.speedup_quartiles))
        record = dataclasses.replace(record, notes=tuple(record.notes))
        numbers = isinstance(record.figures, dict) and all(
            isinstance(value, int | float) for value in record.figures.values()
        )
        by_name = (record.settings, record.conditions, record.measured_with, record.config or {})
        if not numbers or not all(isinstance(values, dict) for values in by_name):
            raise ConfigError("not a quality record: expected numbers in figures, and settings by name")
        return dataclasses.replace(record, settings=with_new_names(record.settings))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleRecord:
    """A dense picture and the picture of a variant with the same prompt and seed.

    Attributes:
        prompt: text of the prompt.
        seed: seed of both pictures.
        variant: name of the variant, such as ``"tome"``.
        settings: the ratio, and the settings that differ from the variant's defaults.
        dense: path of the dense picture, relative to the folder of the file with this record.
        image: path of the variant's picture, relative to the same folder.
    """

    prompt: str
    seed: int
    variant: str
    settings: Mapping[str, Any]
    dense: str
    image: str

    @property
    def label(self) -> str:
        """The variant with its settings."""
        return variant_label(self.variant, self.settings)

    @property
    def key(self) -> str:
        """A key that is equal for the same pair."""
        return key_of(dataclasses.asdict(self))

    def to_line(self) -> str:
        """One line of JSON, its newline included."""
        return _line("sample", self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SampleRecord:
        """Read what :meth:`to_line` wrote.

        Raises:
            ConfigError: it is not such a record, or a path leads out of the folder.
        """
        record = _read(cls, values)
        for path in (record.dense, record.image):
            inside = isinstance(path, str) and not PurePosixPath(path).is_absolute()
            if not inside or ".." in PurePosixPath(path).parts:
                raise ConfigError(f"not a sample: expected a path inside the results folder, got {path!r}")
        if not isinstance(record.settings, dict):
            raise ConfigError(f"not a sample: expected settings by name, got {record.settings!r}")
        return dataclasses.replace(record, settings=with_new_names(record.settings))


def metric_names(records: Sequence[QualityRecord]) -> list[str]:
    """Names of all metrics, in the order of the record with the most. Dense has fewer than the others."""
    ordered = sorted(records, key=lambda record: -len(record.figures))
    return list(dict.fromkeys(name for record in ordered for name in record.figures))


def read_quality(path: Path) -> Iterator[QualityRecord | SampleRecord]:
    """Read the records of an evaluation in a results file, in order. Lines of other kinds are skipped.

    Raises:
        ConfigError: the file cannot be read, or a line is not a valid record.
    """
    return read_records(path, {"quality": QualityRecord, "sample": SampleRecord})


def _line(kind: str, record: Any) -> str:
    values = {"kind": kind, **dataclasses.asdict(record)}
    return json.dumps(values, ensure_ascii=False, allow_nan=False) + "\n"


def _read(cls: Any, values: Mapping[str, Any]) -> Any:
    names = [field.name for field in dataclasses.fields(cls)]
    missing = [name for name in names if name not in values]
    if missing:
        raise ConfigError(f"not a {values.get('kind')} record: {', '.join(missing)} missing")
    return cls(**{name: values[name] for name in names})
