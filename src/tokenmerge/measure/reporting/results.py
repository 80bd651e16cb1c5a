"""Reads files and folders of results with all kinds of records."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenmerge.errors import ConfigError
from tokenmerge.measure.bench.records import KIND, CellRecord
from tokenmerge.measure.bench.results_file import read_lines
from tokenmerge.measure.files import is_folder
from tokenmerge.measure.reporting.quality import QualityRecord, SampleRecord


@dataclasses.dataclass(frozen=True)
class Sample:
    """A pair of pictures.

    Args:
        record: the record of the pair.
        dense: path of the dense picture.
        image: path of the variant's picture.
    """

    record: SampleRecord
    dense: Path
    image: Path


@dataclasses.dataclass(frozen=True)
class Results:
    """All records of some files.

    Args:
        cells: benchmark cells, the last one for equal conditions.
        quality: quality metrics, the last ones for the same pictures.
        samples: pairs of pictures, each once.
        notes: remarks on the files, such as an incomplete last line.
    """

    cells: tuple[CellRecord, ...]
    quality: tuple[QualityRecord, ...] = ()
    samples: tuple[Sample, ...] = ()
    notes: tuple[str, ...] = ()


def read_results(paths: Sequence[Path]) -> Results:
    """Read results files, and all ``*.jsonl`` files of folders.

    Raises:
        ConfigError: there is no file, or a file cannot be read or holds something else.
    """
    cells: dict[str, CellRecord] = {}
    quality: dict[str, QualityRecord] = {}
    samples: dict[str, Sample] = {}
    notes: list[str] = []
    for file in _files(paths):
        for number, values in read_lines(file, notes):
            try:
                _add(values, file, cells, quality, samples)
            except ConfigError as error:
                raise ConfigError(f"{file}, line {number}: {error}") from error
    return Results(tuple(cells.values()), tuple(quality.values()), tuple(samples.values()), tuple(notes))


def _add(
    values: dict[str, Any],
    file: Path,
    cells: dict[str, CellRecord],
    quality: dict[str, QualityRecord],
    samples: dict[str, Sample],
) -> None:
    kind = values.get("kind")
    if kind == KIND:
        cell = CellRecord.from_dict(values)
        cells.pop(cell.key, None)
        cells[cell.key] = cell
    elif kind == "quality":
        figures = QualityRecord.from_dict(values)
        quality.pop(figures.key, None)
        quality[figures.key] = figures
    elif kind == "sample":
        record = SampleRecord.from_dict(values)
        samples[f"{file.parent} {record.key}"] = Sample(
            record, file.parent / record.dense, file.parent / record.image
        )
    else:
        raise ConfigError(f"kind: expected one of {KIND}, quality, sample, got {kind!r}")


def _files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        found = sorted(path.glob("*.jsonl")) if is_folder(path) else [path]
        if not found:
            raise ConfigError(
                f"results: the folder {path} has no .jsonl file; give what tokenmerge bench wrote"
            )
        files += found
    if not files:
        raise ConfigError("results: none given; give files or folders of tokenmerge bench or evaluate")
    return list(dict.fromkeys(files))
