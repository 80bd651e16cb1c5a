"""What an evaluation leaves for the report: closeness of a variant, and pairs of pictures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from tokenmerge.bench.records import variant_label
from tokenmerge.errors import ConfigError

__all__ = ["LOWER_IS_CLOSER", "QualityRecord", "SampleRecord"]

# Figures that fall as pictures come closer to dense; all others rise.
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
    """

    model: str
    width: int
    height: int
    variant: str
    settings: Mapping[str, Any]
    figures: Mapping[str, float]
    images: int

    @property
    def label(self) -> str:
        """The variant with its settings."""
        return variant_label(self.variant, self.settings)

    def to_line(self) -> str:
        """One line of JSON, its newline included; a file may mix all kinds of records."""
        return _line("quality", self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> QualityRecord:
        """Read what :meth:`to_line` wrote.

        Raises:
            ConfigError: it is not such a record.
        """
        record = _read(cls, values)
        numbers = isinstance(record.figures, dict) and all(
            isinstance(value, int | float) for value in record.figures.values()
        )
        if not numbers or not isinstance(record.settings, dict):
            raise ConfigError("not a record of quality: expected figures as numbers and settings by name")
        return record


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
        return record


def _line(kind: str, record: Any) -> str:
    values = {"kind": kind, **dataclasses.asdict(record)}
    return json.dumps(values, ensure_ascii=False, allow_nan=False) + "\n"


def _read(cls: Any, values: Mapping[str, Any]) -> Any:
    names = [field.name for field in dataclasses.fields(cls)]
    missing = [name for name in names if name not in values]
    if missing:
        raise ConfigError(f"not a record of {values.get('kind')}: {', '.join(missing)} missing")
    return cls(**{name: values[name] for name in names})
