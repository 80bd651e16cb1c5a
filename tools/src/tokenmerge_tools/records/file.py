"""Results files of all commands: JSON lines, each flushed to disk when it is appended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from tokenmerge.errors import ConfigError, TokenMergingError, reason_of
from tokenmerge_tools.files import check_regular, is_folder, read_bytes, writing, wrote_result
from tokenmerge_tools.records.kinds import CellRecord, QualityRecord, Record, SampleRecord, TuneRecord

R = TypeVar("R", bound=Record)
TimedCall = tuple[float, int | None]  # the seconds, and the peak memory in bytes or None


class RecordNotWrittenError(TokenMergingError):
    """A record could not be appended to the results file. The message says where it was saved instead."""


class ResultsFile(Generic[R]):
    """A file of JSON lines that a run appends to. Records of earlier runs stay in it.

    If a killed run left the last line incomplete, this line is moved to ``<name>.torn`` beside the file.

    ``kinds`` are the kinds of records that matter to the run; other lines are skipped. ``records`` maps each
    key to its last record, and ``notes`` are messages for the user about the file.
    """

    def __init__(self, path: Path, *kinds: type[R]) -> None:
        self.path = path
        self.notes: list[str] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            check_regular(path)
            self._file = path.open("ab+", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"out: cannot write to {path} ({error.strerror or error}); choose another file with --out"
            ) from error
        try:
            self._lock()
            self.records: dict[str, R] = {record.key: record for record in read_records(path, *kinds)}
            self._set_torn_line_aside()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> ResultsFile[R]:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def append(self, record: R) -> None:
        """Append one record and flush it to disk. If that fails, a RecordNotWrittenError says where it is."""
        line = record.to_line().encode()
        before = self._file.seek(0, os.SEEK_END)
        try:
            rest = memoryview(line)
            while rest:
                written = self._file.write(rest) or 0
                rest = rest[written:]
            os.fsync(self._file.fileno())
        except OSError as error:
            # If this fails too, the next run moves the incomplete line away.
            with contextlib.suppress(OSError):
                self._file.truncate(before)
            raise RecordNotWrittenError(
                f"out: cannot write to {self.path} ({error.strerror or error}); the {len(self.records)} "
                f"records in it are safe, and the new one is {_keep_elsewhere(line)}; free some space, "
                f"append it to {self.path.name}, and run the same command again to continue"
            ) from error
        self.records[record.key] = record
        wrote_result(self.path)

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # Windows
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"out: another run is writing to {self.path}; wait for it, or choose another file with --out"
            ) from error
        except OSError as error:  # some network file systems have no locks
            self.notes.append(
                f"{self.path} cannot be locked here ({error.strerror or error}): let no other run write to it"
            )

    def _set_torn_line_aside(self) -> None:
        text = self.path.read_bytes()
        torn = _torn_end(text)
        aside = self.path.with_name(self.path.name + ".torn")
        advice = "free some space, and run the same command again"
        if torn:
            with writing(aside, "out", advice), aside.open("ab") as file:
                file.write(torn + b"\n")
                file.flush()
                os.fsync(file.fileno())
                self._file.truncate(len(text) - len(torn))
            done = f"it was moved to {aside.name}, and its cell is measured again"
            self.notes.append(_torn_note(self.path, done))
        elif text and not text.endswith(b"\n"):
            with writing(self.path, "out", advice):
                self._file.write(b"\n")


class UnfinishedCells:
    """The file ``<name>.unfinished`` beside the results, with a line of JSON for each timed call.

    All cells of a setting finish in the last round, because their calls are interleaved. Until then, their
    timings would be lost if the run was killed. Incomplete or damaged lines are ignored. If the disk is full,
    timings are kept only in memory.
    """

    def __init__(self, results: Path) -> None:
        self.path = results.with_name(f"{results.name}.unfinished")
        self.calls: dict[str, list[TimedCall]] = defaultdict(list)
        with contextlib.suppress(OSError):
            for line in self.path.read_bytes().splitlines():
                with contextlib.suppress(ValueError, TypeError, RecursionError):
                    name, seconds, peak = json.loads(line)
                    if math.isfinite(seconds) and seconds > 0 and (peak is None or type(peak) is int):
                        self.calls[name].append((float(seconds), peak))

    def add(self, name: str, call: TimedCall) -> None:
        """Save one more call of a cell."""
        self.calls[name].append(call)
        with contextlib.suppress(OSError), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([name, *call]) + "\n")

    def clear(self) -> None:
        """Delete all calls, once the cells have their records."""
        self.calls.clear()
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True)
class Sample:
    """A pair of images."""

    record: SampleRecord
    dense: Path
    image: Path


@dataclasses.dataclass(frozen=True)
class Results:
    """The records of some files. Of several records with equal keys, only the last is kept."""

    cells: tuple[CellRecord, ...]
    quality: tuple[QualityRecord, ...] = ()
    samples: tuple[Sample, ...] = ()
    notes: tuple[str, ...] = ()


def read_results(paths: Sequence[Path]) -> Results:
    """Read results files of ``bench`` and ``evaluate``, and all ``*.jsonl`` files of folders.

    Measurements of ``tune`` in them are skipped, with a note.
    """
    cells: dict[str, CellRecord] = {}
    quality: dict[str, QualityRecord] = {}
    samples: dict[tuple[Path, str], Sample] = {}
    notes: list[str] = []
    for file in _files(paths):
        folder = file.parent
        tuned = 0
        kinds = (CellRecord, QualityRecord, SampleRecord, TuneRecord)
        for record in read_records(file, *kinds, notes=notes, only=True):
            if isinstance(record, TuneRecord):
                tuned += 1
                continue
            if isinstance(record, SampleRecord):
                samples[folder, record.key] = Sample(record, folder / record.dense, folder / record.image)
                continue
            latest: dict[str, Any] = cells if isinstance(record, CellRecord) else quality
            latest.pop(record.key, None)
            latest[record.key] = record
        if tuned:
            notes.append(f"{file}: {tuned} measurements of tokenmerge tune, whose result is in its own files")
    return Results(tuple(cells.values()), tuple(quality.values()), tuple(samples.values()), tuple(notes))


def _files(paths: Sequence[Path]) -> Iterable[Path]:
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
    return dict.fromkeys(files)


def read_records(
    path: Path, *kinds: type[R], notes: list[str] | None = None, only: bool = False
) -> Iterator[R]:
    """Read the records of some kinds in a results file, in order.

    Lines of other kinds are skipped, or refused if ``only`` is true. ``notes`` gets a message if the last
    line is incomplete.
    """
    known = {kind.KIND: kind for kind in kinds}
    for number, values in read_lines(path, notes):
        name = str(values.get("kind"))
        try:
            if name in known:
                record = known[name].from_dict(values)
                _ = record.key  # conditions without a key, such as NaN, are found here
                yield record
            elif only:
                raise ConfigError(f"kind: expected one of {', '.join(known)}, got {values.get('kind')!r}")
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path}, line {number}: not a record of tokenmerge ({type(error).__name__}: "
                f"{reason_of(error)}); remove that line"
            ) from error


def read_lines(path: Path, notes: list[str] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read the objects of a JSON-lines file with their line numbers, except an incomplete last line."""
    text = read_bytes(path, "results", "give a file of tokenmerge bench or evaluate")
    torn = _torn_end(text)
    if torn and notes is not None:
        notes.append(_torn_note(path, "it is skipped"))
    for number, line in enumerate(text[: len(text) - len(torn)].splitlines(), start=1):
        if line.strip():
            values = _parse(line)
            if values is None:
                raise ConfigError(
                    f"results: line {number} of {path} is not a JSON object; give a file that tokenmerge "
                    "bench or evaluate wrote, or remove that line"
                )
            yield number, values


def _torn_end(text: bytes) -> bytes:
    """Return the last line if writing was interrupted: part of an object, or zero bytes of a lost block."""
    last = text[text.rstrip(b"\n").rfind(b"\n") + 1 :]
    if not last.startswith((b"{", b"\0")):
        return b""
    try:
        return b"" if isinstance(json.loads(last), dict) else last
    except RecursionError:  # the line is too deeply nested, but complete
        return b""
    except ValueError:
        return last


def _torn_note(path: Path, what_was_done: str) -> str:
    return f"the last line of {path} is incomplete, because a run was killed: {what_was_done}"


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the object in a line, or None if there is no object that can be written again."""
    try:
        values = json.loads(line)
        if b"\\ud" in line.lower():  # possibly half of a character
            json.dumps(values, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def _keep_elsewhere(line: bytes) -> str:
    """Save a line that could not be appended, and return a text that says where."""
    try:
        descriptor, name = tempfile.mkstemp(prefix="tokenmerge-", suffix=".jsonl")
        with os.fdopen(descriptor, "wb") as file:
            file.write(line)
    except OSError:
        return f"this line: {line.decode().strip()}"
    return f"in {name}"
