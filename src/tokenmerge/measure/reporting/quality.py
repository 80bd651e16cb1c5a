"""Records of an evaluation: closeness of a variant, and pairs of pictures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from tokenmerge.config import with_new_names
from tokenmerge.errors import ConfigError
from tokenmerge.measure.bench.records import key_of, variant_label
from tokenmerge.measure.bench.results_file import read_lines

__all__ = ["LOWER_IS_CLOSER", "QualityRecord", "SampleRecord", "metric_names", "read_quality"]

# Metrics that are lower for closer pictures; all others are higher.
LOWER_IS_CLOSER = frozenset({"lpips", "fid", "kid"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class QualityRecord:
    """Closeness of one variant to dense, or another figure of quality, over many pictures.

    Attributes:
        model: as in the records of a benchmark.
        width: in pixels.
        height: in pixels.
        variant: name, such as ``"tome"``.
        settings: those of the variant that differ from its defaults, and its ratio.
        figures: mean over the pictures, by the name of the metric, such as ``{"psnr": 24.1, "ssim": 0.83}``;
            finite numbers.
        images: how many pictures, ≥ 1.
        category: the part of the prompts that the pictures are of; None: all.
        conditions: everything else that the pictures depend on, as values that JSON can hold; ``steps`` are
            those of dense.
        steps_used: of ``"fewer-steps"``, how many; None: as many as dense.
        measured_with: network and reference of a figure, by the name of the metric.
        notes: what a reader of the figures should know, in words.
        finished: date and time at which it was measured, ISO 8601 with the offset; "" if nothing says it.
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
    steps_used: int | None = None
    measured_with: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    finished: str = dataclasses.field(default="", compare=False)

    @property
    def label(self) -> str:
        """The variant with its settings."""
        return variant_label(self.variant, self.settings)

    @property
    def drawn_with(self) -> dict[str, Any]:
        """What all pictures depend on, the model and their size among it."""
        return {"model": self.model, "width": self.width, "height": self.height, **self.conditions}

    @property
    def key(self) -> str:
        """Equal for figures of the same pictures, of which the later ones count."""
        values = dataclasses.asdict(self)
        for name in ("figures", "measured_with", "notes", "finished"):
            del values[name]
        return key_of(values)

    def to_line(self) -> str:
        """One line of JSON, its newline included; a file may mix all kinds of records."""
        return _line("quality", self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> QualityRecord:
        """Read what :meth:`to_line` wrote.

        Raises:
            ConfigError: it is not such a record.
        """
        # Older records do not say when, nor with how many steps.
        record = _read(cls, {"finished": "", "steps_used": None, **values})
        record = dataclasses.replace(record, notes=tuple(record.notes))
        numbers = isinstance(record.figures, dict) and all(
            isinstance(value, int | float) for value in record.figures.values()
        )
        by_name = (record.settings, record.conditions, record.measured_with)
        if not numbers or not all(isinstance(values, dict) for values in by_name):
            raise ConfigError("not a record of quality: expected figures as numbers and settings by name")
        return dataclasses.replace(record, settings=with_new_names(record.settings))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleRecord:
    """A dense picture and that of a variant from the same prompt and seed.

    Attributes:
        prompt: text, shown as it is.
        seed: of both pictures.
        variant: name, such as ``"tome"``.
        settings: those of the variant that differ from its defaults, and its ratio.
        dense: path of the dense picture, relative to the folder of the file with this record.
        image: path of the variant's picture, likewise.
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
        """Equal for the same pair."""
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
    """Names of all figures, in the order of the record that has most; dense has none beside itself."""
    ordered = sorted(records, key=lambda record: -len(record.figures))
    return list(dict.fromkeys(name for record in ordered for name in record.figures))


def read_quality(path: Path) -> Iterator[QualityRecord | SampleRecord]:
    """What an evaluation wrote to a results file, in order; lines of another kind are passed over.

    Raises:
        ConfigError: it cannot be read, or a line is not a record.
    """
    kinds: dict[str, Any] = {"quality": QualityRecord, "sample": SampleRecord}
    for number, values in read_lines(path):
        kind = kinds.get(values.get("kind", ""))
        if kind is not None:
            try:
                yield kind.from_dict(values)
            except ConfigError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error


def _line(kind: str, record: Any) -> str:
    values = {"kind": kind, **dataclasses.asdict(record)}
    return json.dumps(values, ensure_ascii=False, allow_nan=False) + "\n"


def _read(cls: Any, values: Mapping[str, Any]) -> Any:
    names = [field.name for field in dataclasses.fields(cls)]
    missing = [name for name in names if name not in values]
    if missing:
        raise ConfigError(f"not a record of {values.get('kind')}: {', '.join(missing)} missing")
    return cls(**{name: values[name] for name in names})
