"""Reads files and folders of results with all kinds of records."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenmerge.errors import ConfigError
from tokenmerge_tools.files import is_folder
from tokenmerge_tools.records.file import read_records
from tokenmerge_tools.records.kinds import KIND, CellRecord
from tokenmerge_tools.reporting.quality import QualityRecord, SampleRecord

_KINDS = {KIND: CellRecord, "quality": QualityRecord, "sample": SampleRecord}


@dataclasses.dataclass(frozen=True)
class Sample:
    """A pair of pictures."""

    record: SampleRecord
    dense: Path
    image: Path


@dataclasses.dataclass(frozen=True)
class Results:
    """The records of some files.

    Of several cells with equal conditions, only the last is kept. The same holds for quality records of the
    same pictures.
    """

    cells: tuple[CellRecord, ...]
    quality: tuple[QualityRecord, ...] = ()
    samples: tuple[Sample, ...] = ()
    notes: tuple[str, ...] = ()


def read_results(paths: Sequence[Path]) -> Results:
    """Read results files, and all ``*.jsonl`` files of folders.

    Raises:
        ConfigError: there is no file, or a file cannot be read or has other records.
    """
    cells: dict[str, CellRecord] = {}
    quality: dict[str, QualityRecord] = {}
    samples: dict[tuple[Path, str], Sample] = {}
    notes: list[str] = []
    for file in _files(paths):
        folder = file.parent
        for record in read_records(file, _KINDS, notes, only=True):
            if isinstance(record, SampleRecord):
                pair = Sample(record, folder / record.dense, folder / record.image)
                samples[folder, record.key] = pair
                continue
            latest: dict[str, Any] = cells if isinstance(record, CellRecord) else quality
            latest.pop(record.key, None)
            latest[record.key] = record
    return Results(tuple(cells.values()), tuple(quality.values()), tuple(samples.values()), tuple(notes))


def _files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        found = sorted(path.glob("*.jsonl")) if is_folder(path) else [path]
        if not found:
            raise ConfigError(
                f"results: the folder {path} has no .jsonl file; give results of tokenmerge bench or evaluate"
            )
        files += found
    if not files:
        raise ConfigError("results: none given; give files or folders of tokenmerge bench or evaluate")
    return list(dict.fromkeys(files))
